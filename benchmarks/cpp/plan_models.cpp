// Lays the parameters of a published model out among many ranks: its shapes alone, no tensors.
//
//   plan_models benchmarks/models/llama-3-8b.tsv 8 1024
//
// Each unit has the layout that fully_shard() gives it, in float, or that of FSDP2, which pads each parameter by
// itself. Prints a line of JSON for each layout and number of ranks, with the time of a step on hosts of 8 ranks.
#include "engine/step_time.h"
#include "layout/shards.h"

#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>

namespace {

using Shapes = std::vector<std::vector<int64_t>>;
constexpr int64_t kElement = 4;

struct Unit {
  int64_t copies = 0;
  Shapes shapes;
  /// Elements that a token is computed with.
  double computed = 0;
};

std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, 'x');) sizes.push_back(std::stoll(part));
  return sizes;
}

int64_t elements(const Shapes& shapes) {
  int64_t sum = 0;
  for (const auto& shape : shapes) {
    int64_t product = 1;
    for (const auto size : shape) product *= size;
    sum += product;
  }
  return sum;
}

std::map<std::string, Unit> read(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::invalid_argument("plan_models: there is no file " + file + ".");
  std::map<std::string, Unit> units;
  double experts = 1;
  for (std::string line; std::getline(in, line);) {
    constexpr std::string_view kExperts = "# experts for a token: ";
    if (line.starts_with(kExperts)) {
      std::istringstream words(line.substr(kExperts.size()));
      std::string of;
      double all = 1;
      words >> experts >> of >> all;
      experts /= all;
    }
    if (line.starts_with("#")) continue;
    std::istringstream words(line);
    std::string unit;
    std::string tensor;
    std::string sizes;
    int64_t copies = 0;
    if (!(words >> unit >> copies >> tensor >> sizes)) {
      throw std::invalid_argument("plan_models: in " + file + " is no unit, copies, tensor and sizes: " + line);
    }
    units[unit].copies = copies;
    const auto shape = sizes_of(sizes);
    units[unit].shapes.push_back(shape);
    const bool is_of_experts = tensor.find("expert") != std::string::npos;
    units[unit].computed += static_cast<double>(elements({shape})) * (is_of_experts ? experts : 1);
  }
  return units;
}

enum class Layout { rows, flat, fsdp2 };
constexpr const char* kNames[] = {"rows", "flat", "FSDP2"};

/// Elements that each rank has of a unit.
int64_t part_of(const Shapes& shapes, Layout layout, int64_t ranks) {
  const auto alignment = shardwise::layout::alignment(kElement);
  if (layout == Layout::flat) return shardwise::layout::flat(shapes, ranks, alignment).part;
  if (layout == Layout::rows) {
    return shardwise::layout::rows(shapes, std::vector<int64_t>(shapes.size(), 0), ranks, alignment).part;
  }
  int64_t part = 0;
  for (const auto& shape : shapes) part += (shape[0] + ranks - 1) / ranks * (elements({shape}) / shape[0]);
  return part;
}

/// The step of a rank: gathers in 16 bits, sums in 32, and 8192 tokens at 400 TFLOP/s, in hosts of 8 ranks.
class Step {
 public:
  explicit Step(int64_t ranks)
      : ranks_{ranks, 1, shardwise::Links().inside({450e9, 10e-6}).between({400e9, 20e-6}).ranks_per_host(8)} {}

  void add(const std::string& name, const Shapes& shapes, int64_t part, double computed) {
    const auto all = elements(shapes);
    computed_ += computed;
    const auto number = units_.size();
    units_.push_back(
        {.groups = {{.bucket = 4 * part * ranks_.shards, .sum = 4 * part, .part = 2 * part}},
         .outer = std::nullopt,
         .has_full_copies = true,
         .reshards_after_forward = name != "root",
         .is_gathered = true});
    using Kind = shardwise::engine::StepEvent::Kind;
    events_.push_back({.kind = Kind::begin, .unit = number});
    events_.push_back({.kind = Kind::use, .unit = number, .gradient = all, .work = computed});
    events_.push_back({.kind = Kind::end, .unit = number});
  }
  double compute() const {
    return 6 * computed_ * 8192 / 400e12;
  }
  shardwise::engine::StepTime time() {
    // The outermost unit, which is here the last to compute.
    for (size_t i = 0; i + 1 < units_.size(); ++i) units_[i].outer = units_.size() - 1;
    return shardwise::engine::time_steps(units_, events_, ranks_, compute());
  }

 private:
  shardwise::engine::StepRanks ranks_;
  std::vector<shardwise::engine::UnitBytes> units_;
  std::vector<shardwise::engine::StepEvent> events_;
  double computed_ = 0;
};

void plan(const std::map<std::string, Unit>& units, Layout layout, int64_t ranks) {
  int64_t all = 0;
  int64_t rank_bytes = 0;
  int64_t largest = 0;
  const auto begin = std::chrono::steady_clock::now();
  Step step(ranks);
  for (const auto& [name, unit] : units) {
    for (int64_t copy = 0; copy < unit.copies; ++copy) {
      const auto part = part_of(unit.shapes, layout, ranks);
      step.add(name, unit.shapes, part, unit.computed);
      rank_bytes += kElement * part;
      largest = std::max(largest, kElement * part * ranks);
    }
    all += unit.copies * elements(unit.shapes);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const auto time = step.time();
  std::cout << "{\"layout\": \"" << kNames[static_cast<size_t>(layout)] << "\", \"ranks\": " << ranks
            << ", \"step\": " << time.step << ", \"wire\": " << time.wire << ", \"compute\": " << step.compute()
            << ", \"parameters\": " << all << ", \"rank_bytes\": " << rank_bytes
            << ", \"padding_bytes\": " << rank_bytes * ranks - kElement * all << ", \"largest_gather\": " << largest
            << ", \"seconds\": " << seconds.count() << "}" << std::endl;
}

} // namespace

int main(int count, char** arguments) {
  try {
    if (count < 3) throw std::invalid_argument("plan_models: the arguments are a file and numbers of ranks.");
    const auto units = read(arguments[1]);
    for (int i = 2; i < count; ++i) {
      for (const auto layout : {Layout::rows, Layout::flat, Layout::fsdp2}) {
        plan(units, layout, std::stoll(arguments[i]));
      }
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
