#include "transport/sums.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <array>
#include <type_traits>

namespace shardwise::transport {
namespace {

/// Elements per block. 16 sums stay in registers, which takes a third less time than keeping them in the L1 cache.
/// Where the dtype has to be converted, compilers do not vectorize so few, so blocks are larger and stay in the cache.
template <typename T, typename Sum>
constexpr int64_t kBlock = std::is_same_v<T, Sum> ? 16 : 1024;

template <typename T, typename Sum>
void add_up_as(void* output, const std::vector<const std::byte*>& terms, int64_t elements, bool mean) {
  constexpr auto kSize = kBlock<T, Sum>;
  const auto number = terms.size();
  const auto* from = terms.data();
  // Only with a constant count do the sums stay in registers. `output` and a term may be the same memory, so a block is
  // read from all terms before it is written.
  const auto add_block = [&](int64_t begin, auto count) {
    std::array<Sum, kSize> sums;
    const auto* first = reinterpret_cast<const T*>(from[0]) + begin;
    for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(first[i]);
    for (size_t term = 1; term < number; ++term) {
      const auto* next = reinterpret_cast<const T*>(from[term]) + begin;
      for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(sums[i] + static_cast<Sum>(next[i]));
    }
    if constexpr (std::is_floating_point_v<Sum>) {
      if (mean) {
        for (int64_t i = 0; i < count; ++i) sums[i] /= static_cast<Sum>(number);
      }
    }
    auto* to = static_cast<T*>(output) + begin;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(sums[i]);
  };
  const auto whole = elements - elements % kSize;
  for (int64_t begin = 0; begin < whole; begin += kSize) {
    add_block(begin, std::integral_constant<int64_t, kSize>{});
  }
  if (whole < elements) add_block(whole, elements - whole);
}

template <typename T>
void divide_as(void* numbers, int64_t elements, int64_t divisor) {
  auto* first = static_cast<T*>(numbers);
  for (int64_t i = 0; i < elements; ++i) first[i] /= static_cast<T>(divisor);
}

} // namespace

void divide(void* numbers, int64_t elements, at::ScalarType dtype, int64_t divisor) {
  if (dtype == at::kDouble) return divide_as<double>(numbers, elements, divisor);
  TORCH_INTERNAL_ASSERT(dtype == at::kFloat, "no division of ", dtype);
  divide_as<float>(numbers, elements, divisor);
}

bool can_add_up(at::ScalarType dtype, bool mean) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
      return true;
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
      return !mean;
    default:
      return false;
  }
}

// Integers are added as unsigned ones, whose overflow is defined.
void add_up(
    void* output, const std::vector<const std::byte*>& terms, int64_t elements, at::ScalarType dtype, bool mean) {
  switch (dtype) {
    case at::kDouble:
      return add_up_as<double, double>(output, terms, elements, mean);
    case at::kFloat:
      return add_up_as<float, float>(output, terms, elements, mean);
    case at::kHalf:
      return add_up_as<c10::Half, float>(output, terms, elements, mean);
    case at::kBFloat16:
      return add_up_as<c10::BFloat16, float>(output, terms, elements, mean);
    case at::kLong:
      return add_up_as<uint64_t, uint64_t>(output, terms, elements, mean);
    case at::kInt:
      return add_up_as<uint32_t, uint32_t>(output, terms, elements, mean);
    case at::kShort:
      return add_up_as<uint16_t, uint16_t>(output, terms, elements, mean);
    case at::kChar:
    case at::kByte:
      return add_up_as<uint8_t, uint8_t>(output, terms, elements, mean);
    default:
      TORCH_INTERNAL_ASSERT(false, "no sums of ", dtype);
  }
}

} // namespace shardwise::transport
