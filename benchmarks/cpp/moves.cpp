// Checks what moves pieces of parameters and gradients on a device (csrc/cuda) against torch's operations, then
// measures it beside a copy of torch's.
//
//   moves [--device cpu] [--megabytes 1024] [--large 1]
//
// --large 1 also moves tensors of more than 2^31 elements, which takes some 30 GiB. Prints a line for each figure.
#include "kernels/moves.h"
#include "group/copy_batch.h"
#include "layout/shards.h"

#include "rank_program.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <vector>

namespace {

using namespace shardwise;
using group::CopyBatch;
using group::Piece;

constexpr int kRounds = 20;
const std::vector<at::ScalarType> kNumbers{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

void require(bool is_so, const std::string& what) {
  if (!is_so) throw std::runtime_error("moves: not what torch computes: " + what);
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

/// A parameter of a unit: where its pieces lie in a vector of `total` elements, as in a bucket of gradients.
struct Cut {
  at::Tensor whole;
  std::vector<Piece> pieces;
};
struct Unit {
  std::vector<Cut> cuts;
  at::Tensor vector;
};

Unit unit_of(
    const std::vector<std::vector<int64_t>>& shapes, int64_t dim, int64_t world, at::ScalarType from, at::ScalarType to,
    at::Device device) {
  const std::vector<int64_t> dims(shapes.size(), dim);
  const auto shards = layout::rows(shapes, dims, world, layout::alignment(static_cast<int64_t>(c10::elementSize(to))));
  const auto segment = layout::with_counts(shards, shapes.size(), 64);
  Unit unit;
  for (size_t i = 0; i < shapes.size(); ++i) {
    Cut cut{at::randn(shapes[i], at::TensorOptions(device).dtype(from)), {}};
    for (int64_t rank = 0; rank < world; ++rank) {
      group::add_piece(
          cut.pieces, {group::runs_of(shards.cuts[i], rank), rank * segment + shards.cuts[i].offsets[rank]});
    }
    unit.cuts.push_back(std::move(cut));
  }
  unit.vector = at::zeros({world * segment}, at::TensorOptions(device).dtype(to));
  return unit;
}

void fill_vector(const Unit& unit, double factor) {
  CopyBatch moves;
  for (const auto& cut : unit.cuts) moves.scale(cut.whole, cut.pieces, factor, unit.vector);
  moves.run();
}

/// The pieces of every parameter, one after another, as its vector has them.
at::Tensor read_back(const Cut& cut, const at::Tensor& vector) {
  auto back = at::full_like(cut.whole, 7, at::TensorOptions().dtype(vector.scalar_type()));
  CopyBatch moves;
  moves.put(back, cut.pieces, vector);
  moves.run();
  return back;
}

void check_units(at::Device device) {
  const std::vector<std::vector<int64_t>> shapes{{96, 33}, {7, 5, 11}, {1, 1}, {130, 64}, {3, 1}};
  for (const auto from : kNumbers) {
    for (const auto to : kNumbers) {
      for (const int64_t world : {1, 2, 3, 8, 700}) {
        for (const int64_t dim : {0, 1}) {
          const auto unit = unit_of(shapes, dim, world, from, to, device);
          fill_vector(unit, 1.0 / 3);
          for (const auto& cut : unit.cuts) {
            const auto wide = from == at::kDouble || to == at::kDouble ? at::kDouble : at::kFloat;
            const auto expected = at::mul(cut.whole.to(wide), 1.0 / 3).to(to);
            const auto what =
                c10::str(from, " to ", to, ", ", world, " ranks, dimension ", dim, ", ", cut.whole.sizes());
            require(read_back(cut, unit.vector).equal(expected), what);
          }
        }
      }
    }
  }
}

/// At every offset, so that nothing lies where words of 16 bytes do.
void check_offsets(at::Device device) {
  const auto whole = at::arange(200'000, at::TensorOptions(device).dtype(at::kFloat));
  for (const auto dtype : {at::kByte, at::kHalf, at::kFloat, at::kDouble, at::kComplexDouble}) {
    const auto source = whole.to(dtype);
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    for (int64_t from = 0; from < 5; ++from) {
      for (int64_t to = 0; to < 5; ++to) {
        auto target = at::zeros_like(source);
        auto expected = at::zeros_like(source);
        const auto move = [&](int64_t count, int64_t length, int64_t stride, int64_t to_stride) {
          const auto* first = static_cast<const char*>(source.const_data_ptr()) + from * size;
          auto* second = static_cast<char*>(target.mutable_data_ptr()) + to * size;
          kernels::copy(device, size, {{first, second, count, length, stride, to_stride}});
          expected.as_strided({count, length}, {to_stride, 1}, to)
              .copy_(source.as_strided({count, length}, {stride, 1}, from));
          require(target.equal(expected), c10::str("copies of ", dtype, " from ", from, " to ", to));
        };
        move(1, 150'001, 0, 0);
        move(3, 50'000, 60'000, 55'000);
        move(900, 16, 32, 48);
        move(70, 13, 100, 90);
      }
    }
  }
}

void check_large(at::Device device) {
  constexpr int64_t kBig = (int64_t{1} << 31) + 4'000'011;
  const auto options = at::TensorOptions(device).dtype(at::kHalf);
  const auto source = at::empty({kBig}, options).normal_();
  auto target = at::zeros({kBig + 1}, options);
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(target.mutable_data_ptr());
  kernels::copy(device, 2, {{from, to + 2, 1, kBig, 0, 0}});
  require(target.narrow(0, 1, kBig).equal(source), "a copy of more than 2^31 elements");
  target.zero_();
  kernels::scale(device, at::kHalf, at::kHalf, 2, {{from, to, kBig / 13, 13, 13, 13}});
  require(target.narrow(0, 0, kBig / 13 * 13).equal(source.narrow(0, 0, kBig / 13 * 13).mul(2)), "many short runs");
  const auto bytes = source.view(at::kByte);
  target.zero_();
  kernels::copy(device, 1, {{from, to, bytes.numel() / 11, 11, 11, 11}});
  const auto moved = bytes.numel() / 11 * 11;
  require(target.view(at::kByte).narrow(0, 0, moved).equal(bytes.narrow(0, 0, moved)), "runs of more than 2^32 bytes");
}

/// The seconds of a call: the median, each after the device has done all before it.
template <typename Call>
double seconds_of(at::Device device, const Call& call) {
  std::vector<double> all;
  for (int i = 0; i < kRounds + 3; ++i) {
    synchronize(device);
    const auto begin = std::chrono::steady_clock::now();
    for (int n = 0; n < 5; ++n) call();
    synchronize(device);
    const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 5;
    if (i >= 3) all.push_back(took);
  }
  std::nth_element(all.begin(), all.begin() + kRounds / 2, all.end());
  return all[kRounds / 2];
}

void say(const std::string& what, double bytes, double seconds, double of) {
  std::printf(
      "moves  %-58s %8.1f us %8.1f GB/s  %.2f of a copy\n", what.c_str(), 1e6 * seconds, bytes / seconds / 1e9,
      bytes / seconds / of);
  std::fflush(stdout);
}

void measure(at::Device device, int64_t megabytes) {
  const auto numel = megabytes * 1'000'000 / 4;
  const auto one = at::ones({numel}, device);
  auto other = at::zeros({numel}, device);
  const auto bytes = 2.0 * static_cast<double>(one.nbytes());
  const auto took = seconds_of(device, [&] { other.copy_(one); });
  const auto rate = bytes / took;
  say("torch's copy_", bytes, took, rate);
  const auto ours = seconds_of(device, [&] {
    kernels::copy(device, 4, {{one.const_data_ptr(), other.mutable_data_ptr(), 1, numel, 0, 0}});
  });
  say("our copy of the same", bytes, ours, rate);
  const auto width = std::max<int64_t>(static_cast<int64_t>(std::sqrt(static_cast<double>(numel) / 12)) / 64 * 64, 64);
  const std::vector<std::vector<int64_t>> block{
      {3 * width, width},
      {3 * width},
      {width, width},
      {width},
      {4 * width, width},
      {4 * width},
      {width, 4 * width},
      {width},
      {width},
      {width},
      {width},
      {width}};
  const std::vector<std::vector<int64_t>> matrices{
      {3 * width, width}, {width, width}, {4 * width, width}, {width, 4 * width}};
  const auto with = [&](const char* name, const auto& shapes, int64_t dim, int64_t world, at::ScalarType from,
                        at::ScalarType to) {
    const auto unit = unit_of(shapes, dim, world, from, to, device);
    double moved = 0;
    for (const auto& cut : unit.cuts) {
      moved +=
          static_cast<double>(cut.whole.numel()) * static_cast<double>(c10::elementSize(from) + c10::elementSize(to));
    }
    const auto text = c10::str(name, ", ", world, " ranks, ", from, " to ", to);
    say("bucket of " + text, moved, seconds_of(device, [&] { fill_vector(unit, 0.125); }), rate);
    if (from != to) return;
    CopyBatch moves;
    for (const auto& cut : unit.cuts) moves.put(cut.whole, cut.pieces, unit.vector);
    moves.run_and_keep();
    say("full copies of " + text, moved, seconds_of(device, [&] { moves.run_again(); }), rate);
  };
  for (const int64_t world : {2, 8, 512}) with("a block", block, 0, world, at::kFloat, at::kFloat);
  with("a block", block, 0, 8, at::kBFloat16, at::kBFloat16);
  with("a block", block, 0, 8, at::kBFloat16, at::kFloat);
  with("a block", block, 0, 8, at::kFloat, at::kBFloat16);
  with("matrices cut along 1", matrices, 1, 8, at::kFloat, at::kFloat);
  with("matrices cut along 1", matrices, 1, 8, at::kBFloat16, at::kFloat);
}

void run(const Arguments& given) {
  at::Device device(value_or(given, "--device", "cpu"));
  if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  check_units(device);
  check_offsets(device);
  if (given.contains("--large")) check_large(device);
  std::printf("moves  all as torch computes them\n");
  measure(device, std::stoll(value_or(given, "--megabytes", "1024")));
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
