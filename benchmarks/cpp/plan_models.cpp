// Lays the parameters of a published model out among many ranks: its shapes alone, no tensors.
//
//   plan_models benchmarks/models/llama-3-8b.tsv 8 1024
//
// Each unit has the layout that fully_shard() gives it, in float. Prints a line of JSON for each layout and number of
// ranks.
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
};

std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, 'x');) sizes.push_back(std::stoll(part));
  return sizes;
}

std::map<std::string, Unit> read(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::invalid_argument("plan_models: there is no file " + file + ".");
  std::map<std::string, Unit> units;
  for (std::string line; std::getline(in, line);) {
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
    units[unit].shapes.push_back(sizes_of(sizes));
  }
  return units;
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

void plan(const std::map<std::string, Unit>& units, bool is_flat, int64_t ranks) {
  const auto alignment = shardwise::layout::alignment(kElement);
  int64_t all = 0;
  int64_t rank_bytes = 0;
  int64_t largest = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& [name, unit] : units) {
    for (int64_t copy = 0; copy < unit.copies; ++copy) {
      const auto shards =
          is_flat ? shardwise::layout::flat(unit.shapes, ranks, alignment)
                  : shardwise::layout::rows(unit.shapes, std::vector<int64_t>(unit.shapes.size(), 0), ranks, alignment);
      rank_bytes += kElement * shards.part;
      largest = std::max(largest, kElement * shards.part * ranks);
    }
    all += unit.copies * elements(unit.shapes);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cout << "{\"layout\": \"" << (is_flat ? "flat" : "rows") << "\", \"ranks\": " << ranks
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
      for (const bool is_flat : {false, true}) plan(units, is_flat, std::stoll(arguments[i]));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
