#include "group/copy_batch.h"
#include "kernels/tiles.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <catch2/catch.hpp>

#include <array>
#include <vector>

using namespace shardwise;

namespace {

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
  static auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return at::randn(sizes, generator, at::kDouble).to(dtype);
}

const std::vector<std::vector<int64_t>> kWholes{{5, 3}, {3, 7}, {2, 4, 6}, {1}, {}};

/// Cuts of them along dimensions, with pieces that are uneven and empty.
std::vector<layout::Shards> layouts() {
  return {
      layout::rows(kWholes, {0, 1, 1, 0, 0}, 3, 4), layout::rows(kWholes, {1, 0, 2, 0, 0}, 2, 1),
      layout::rows(kWholes, {0, 0, 0, 0, 0}, 1, 1), layout::flat(kWholes, 3, 4)};
}

} // namespace

TEST_CASE("scaled pieces have the bits of at::mul, and nothing else is written") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    REQUIRE(group::CopyBatch::scales(dtype, dtype));
    for (const auto& shards : layouts()) {
      for (size_t i = 0; i < kWholes.size(); ++i) {
        const auto& cut = shards.cuts[i];
        const auto whole = random(kWholes[i], dtype);
        for (int64_t rank = 0; rank < shards.world; ++rank) {
          const auto piece = whole.view(cut.shape).narrow(cut.dim, cut.starts[rank], cut.length(rank));
          const auto part = random({shards.part + 9}, dtype);
          const auto expected = part.clone();
          expected.narrow(0, 2, piece.numel()).copy_(at::mul(piece, 1.0 / 3).reshape({-1}));
          group::CopyBatch moves;
          moves.scale(whole, group::Piece{group::runs_of(cut, rank), 2}, 1.0 / 3, part);
          moves.run();
          CHECK(part.equal(expected));
        }
      }
    }
  }
}

TEST_CASE("pieces of several dtypes are moved together, in the order in which they were given") {
  group::CopyBatch moves;
  const auto cut = layout::rows({{6}}, {0}, 2, 1).cuts.front();
  std::vector<at::Tensor> parts;
  for (const auto dtype : {at::kFloat, at::kFloat, at::kHalf, at::kLong, at::kHalf}) {
    auto whole = at::zeros({6}, dtype);
    auto part = at::arange(3, dtype);
    for (int64_t rank = 0; rank < 2; ++rank) moves.put(whole, group::Piece{group::runs_of(cut, rank)}, part);
    parts.push_back(whole);
  }
  // Nobody else keeps what is read.
  const auto target = at::zeros({6}, at::kDouble);
  moves.scale(at::arange(6, at::kFloat), group::Piece{group::runs_of(cut, 1), 1}, 2, target);
  moves.run();
  moves.run();
  for (const auto& whole : parts) CHECK(whole.to(at::kLong).equal(at::tensor({0, 1, 2, 0, 1, 2}, at::kLong)));
  CHECK(target.equal(at::tensor({0, 6, 8, 10, 0, 0}, at::kDouble)));
}

TEST_CASE("pieces that lie where they lay are moved again, and only if all of them were kept") {
  group::CopyBatch moves;
  const auto cut = layout::rows({{6}}, {0}, 2, 1).cuts.front();
  auto part = at::arange(3, at::kFloat);
  auto whole = at::zeros({6}, at::kFloat);
  auto longs = at::zeros({6}, at::kLong);
  for (int64_t rank = 0; rank < 2; ++rank) moves.put(whole, group::Piece{group::runs_of(cut, rank)}, part);
  REQUIRE(moves.run_and_keep());
  CHECK(part.use_count() == 1);
  part.add_(1);
  moves.run_again();
  CHECK(whole.equal(at::tensor({1, 2, 3, 1, 2, 3}, at::kFloat)));
  group::CopyBatch mixed;
  part.add_(1);
  mixed.put(longs, group::Piece{group::runs_of(cut, 0)}, at::arange(3, at::kLong));
  mixed.put(whole, group::Piece{group::runs_of(cut, 0)}, part);
  CHECK(!mixed.run_and_keep());
  CHECK(whole.equal(at::tensor({2, 3, 4, 1, 2, 3}, at::kFloat)));
  CHECK(longs.equal(at::tensor({0, 1, 2, 0, 0, 0}, at::kLong)));
}

TEST_CASE("a tensor is held once for all of its pieces, and for none of no elements") {
  constexpr int64_t kRanks = 1000;
  const auto shards = layout::rows({{2, 3}}, {0}, kRanks, 1);
  const auto whole = at::ones({2, 3});
  const auto part = at::zeros({3});
  const auto held = [&] { return static_cast<int64_t>(whole.use_count()) - 1; };
  group::CopyBatch moves;
  std::vector<group::Piece> pieces;
  for (int64_t rank = 0; rank < kRanks; ++rank) pieces.push_back({group::runs_of(shards.cuts[0], rank), 0});
  moves.scale(whole, c10::ArrayRef(pieces).slice(2), 0.5, part);
  CHECK(held() == 0);
  moves.scale(whole, pieces, 0.5, part);
  CHECK(held() == 1);
  moves.run();
  CHECK(held() == 0);
  CHECK(part.equal(at::full({3}, 0.5)));
}

TEST_CASE("pieces at equal distances are one") {
  std::vector<group::Piece> pieces;
  const auto shards = layout::rows({{6002, 8}}, {0}, 3001, 32);
  for (int64_t rank = 0; rank < 3001; ++rank)
    group::add_piece(pieces, {group::runs_of(shards.cuts[0], rank), rank * 64});
  REQUIRE(pieces.size() == 1);
  CHECK(pieces.front().runs.count == 3001);
}

namespace {

/// What the blocks and threads of a launch do, one after another.
template <typename Act>
void do_all(const std::vector<kernels::Move>& moves, const Act& act) {
  int64_t tiles = 0;
  for (const auto& move : moves) {
    const auto job = kernels::job_of(move, tiles);
    REQUIRE(job.first_tile == tiles);
    for (int64_t tile = 0; tile < kernels::tiles_of(job); ++tile) {
      for (int thread = 0; thread < kernels::kThreads; ++thread) kernels::do_tile(job, tile, thread, act);
    }
    tiles += kernels::tiles_of(job);
  }
}

/// Short and long runs, of one tile and of several, some in whole words.
const std::vector<std::array<int64_t, 4>> kShapes{{3, 5, 12, 7},         {1, 1, 0, 0},      {1, 5000, 0, 0},
                                                  {2, 5000, 5008, 6000}, {700, 16, 16, 24}, {3, 4096, 8192, 4096}};

} // namespace

TEST_CASE("what the threads of a device do is what the loop of the CPU does") {
  for (const auto& [count, length, from_stride, to_stride] : kShapes) {
    const auto read = (count - 1) * from_stride + length;
    const auto written = (count - 1) * to_stride + length;
    const auto move = [shape = std::array{count, length, from_stride, to_stride}](
                          const auto& source, const auto& target) {
      return kernels::Move{source.const_data_ptr(), target.mutable_data_ptr(), shape[0], shape[1], shape[2], shape[3]};
    };
    for (const auto from : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto to : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        const auto source = random({read}, from);
        const auto expected = at::zeros({written}, to);
        kernels::scale(at::kCPU, from, to, 0.3, {move(source, expected)});
        CHECK(expected.count_nonzero().item<int64_t>() >= count * length - 2);
        kernels::with_number(from, [&](auto a) {
          return kernels::with_number(to, [&](auto b) {
            using From = decltype(a);
            using To = decltype(b);
            const auto by = static_cast<kernels::Both<From, To>>(0.3);
            const auto one = at::zeros({written}, to);
            do_all({move(source, one)}, kernels::Scaling<From, To, 1>{by});
            CHECK(one.equal(expected));
            constexpr int kCount = kernels::kNumbersOfWord<From, To>;
            const auto words = at::zeros({written}, to);
            const auto of_words = move(source, words);
            if (kernels::is_in_words(of_words, kCount, sizeof(From), sizeof(To))) {
              do_all({kernels::in_words(of_words, kCount)}, kernels::Scaling<From, To, kCount>{by});
              CHECK(words.equal(expected));
            } else {
              CHECK((length % kCount != 0 || from_stride % kCount != 0 || to_stride % kCount != 0));
            }
            return true;
          });
        });
      }
    }
    const auto source = random({read}, at::kFloat);
    const auto expected = at::zeros({written});
    const auto actual = at::zeros({written});
    kernels::copy(at::kCPU, 4, {move(source, expected)});
    do_all({move(source, actual)}, kernels::Copying<uint32_t>{});
    CHECK(actual.equal(expected));
  }
}

TEST_CASE("what has no fast way says so and writes nothing") {
  auto part = at::zeros({4}, at::kComplexFloat);
  CHECK_FALSE(group::CopyBatch::scales(at::kComplexFloat, at::kFloat));
  CHECK_FALSE(group::CopyBatch::scales(at::kFloat, at::kLong));
  CHECK_FALSE(group::put_flags({true, true}, part, 0, 2));
  CHECK(part.equal(at::zeros({4}, at::kComplexFloat)));
  CHECK(group::CopyBatch::takes(at::empty({32768})));
  CHECK_FALSE(group::CopyBatch::takes(at::empty({32769})));
  CHECK_FALSE(group::CopyBatch::takes(at::empty({4}, at::TensorOptions(at::kMeta))));
}
