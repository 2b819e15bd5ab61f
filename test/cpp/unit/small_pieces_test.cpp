#include "group/small_pieces.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <catch2/catch.hpp>

using namespace shardwise;

namespace {

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
  static auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return at::randn(sizes, generator, at::kDouble).to(dtype);
}

/// Cuts of shapes along dimensions, with pieces that are uneven and empty.
std::vector<layout::Shards> layouts() {
  const std::vector<std::vector<int64_t>> shapes{{5, 3}, {3, 7}, {2, 4, 6}, {1}, {}};
  return {
      layout::rows(shapes, {0, 1, 1, 0, 0}, 3, 4), layout::rows(shapes, {1, 0, 2, 0, 0}, 2, 1),
      layout::rows(shapes, {0, 0, 0, 0, 0}, 1, 1), layout::flat(shapes, 3, 4)};
}

template <typename Check>
void for_each_piece(at::ScalarType dtype, const Check& check) {
  const std::vector<std::vector<int64_t>> shapes{{5, 3}, {3, 7}, {2, 4, 6}, {1}, {}};
  for (const auto& shards : layouts()) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto& cut = shards.cuts[i];
      const auto whole = random(shapes[i], dtype);
      for (int64_t rank = 0; rank < shards.world; ++rank) {
        const auto piece = whole.view(cut.shape).narrow(cut.dim, cut.starts[rank], cut.length(rank));
        check(whole, cut, rank, piece, random({shards.part + 9}, dtype));
      }
    }
  }
}

} // namespace

TEST_CASE("scaled pieces have the bits of at::mul, and nothing else is written") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for_each_piece(
        dtype,
        [&](const at::Tensor& whole, const layout::Cut& cut, int64_t rank, const at::Tensor& piece, at::Tensor part) {
          auto expected = part.clone();
          expected.narrow(0, 2, piece.numel()).copy_(at::mul(piece, 1.0 / 3).reshape({-1}));
          REQUIRE(group::scale_runs(whole, group::runs_of(cut, rank), 1.0 / 3, part, 2));
          CHECK(part.equal(expected));
        });
  }
}

TEST_CASE("pieces are put where they were cut from, and nothing else is written") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kComplexDouble}) {
    for_each_piece(
        dtype == at::kLong ? at::kDouble : dtype,
        [&](at::Tensor whole, const layout::Cut& cut, int64_t rank, const at::Tensor&, at::Tensor part) {
          whole = whole.to(dtype);
          part = part.to(dtype);
          auto expected = whole.clone();
          auto place = expected.view(cut.shape).narrow(cut.dim, cut.starts[rank], cut.length(rank));
          place.copy_(part.narrow(0, 3, place.numel()).view(place.sizes()));
          group::put_runs(whole, group::runs_of(cut, rank), part, 3);
          CHECK(whole.equal(expected));
        });
  }
}

TEST_CASE("what has no fast way says so and writes nothing") {
  auto part = at::zeros({4}, at::kComplexFloat);
  const auto cut = layout::rows({{4}}, {0}, 1, 1).cuts.front();
  CHECK_FALSE(group::scale_runs(at::ones({4}, at::kComplexFloat), group::runs_of(cut, 0), 0.5, part, 0));
  CHECK_FALSE(group::put_flags({true, true}, part, 0));
  CHECK(part.equal(at::zeros({4}, at::kComplexFloat)));
  CHECK(group::is_small(at::empty({32768})));
  CHECK_FALSE(group::is_small(at::empty({32769})));
  CHECK_FALSE(group::is_small(at::empty({4}, at::TensorOptions(at::kMeta))));
}

TEST_CASE("flags are ones and zeros in their order") {
  auto vector = at::full({5}, 7.0F);
  REQUIRE(group::put_flags({true, false, true}, vector, 1));
  CHECK(vector.equal(at::tensor({7.0F, 1.0F, 0.0F, 1.0F, 7.0F})));
}

TEST_CASE("a view has its sizes, shares memory, and is an ordinary tensor") {
  auto buffer = at::arange(12, at::kFloat);
  auto view = group::view_of(buffer, {2, 3}, {1, 2}, 4);
  CHECK(view.equal(buffer.as_strided({2, 3}, {1, 2}, 4)));
  view.add_(1);
  CHECK(buffer[4].item<float>() == 5.0F);
  CHECK_FALSE(view.is_inference());
  CHECK_FALSE(view.is_view());
}
