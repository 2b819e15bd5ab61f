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

/// Calls act() with a number of this dtype, and with one of the type in which it is added. Integers are added as
/// unsigned ones, whose overflow is defined.
template <typename Act>
bool with_types(at::ScalarType dtype, const Act& act) {
  if (dtype == at::kDouble) return act(double(), double());
  if (dtype == at::kFloat) return act(float(), float());
  if (dtype == at::kHalf) return act(c10::Half(), float());
  if (dtype == at::kBFloat16) return act(c10::BFloat16(), float());
  if (dtype == at::kLong) return act(uint64_t(), uint64_t());
  if (dtype == at::kInt) return act(uint32_t(), uint32_t());
  if (dtype == at::kShort) return act(uint16_t(), uint16_t());
  return (dtype == at::kChar || dtype == at::kByte) && act(uint8_t(), uint8_t());
}

} // namespace

void divide(void* numbers, int64_t elements, at::ScalarType dtype, int64_t divisor) {
  with_types(dtype, [&](auto number, auto) {
    auto* first = static_cast<decltype(number)*>(numbers);
    for (int64_t i = 0; i < elements; ++i) first[i] /= static_cast<decltype(number)>(divisor);
    return true;
  });
}

bool can_add_up(at::ScalarType dtype, bool mean) {
  return with_types(dtype, [&](auto, auto sum) { return !mean || std::is_floating_point_v<decltype(sum)>; });
}

void add_up(
    void* output, const std::vector<const std::byte*>& terms, int64_t elements, at::ScalarType dtype, bool mean) {
  const bool added = with_types(dtype, [&](auto number, auto sum) {
    add_up_as<decltype(number), decltype(sum)>(output, terms, elements, mean);
    return true;
  });
  TORCH_INTERNAL_ASSERT(added, "no sums of ", dtype);
}

} // namespace shardwise::transport
