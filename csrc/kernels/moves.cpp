#include "kernels/moves.h"

#include "kernels/cuda_library.h"
#include "kernels/tiles.h"
#include "kernels/trial.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace shardwise::kernels {
namespace {

bool run_on_cuda(at::Device device) {
  static Trial trial([](at::Device tried) { return cuda_library()->why_no_kernels(tried); });
  if (cuda_library() == nullptr) return false;
  return trial.succeeds_on(device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice());
}

} // namespace

bool has_kernels(at::Device device) {
  return device.is_cpu() || (device.is_cuda() && run_on_cuda(device));
}

void copy(at::Device device, int64_t itemsize, const std::vector<Move>& moves) {
  if (device.is_cuda()) return cuda_library()->copy(device, itemsize, moves);
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  for (const auto& move : moves) {
    const auto* from = static_cast<const char*>(move.from);
    auto* to = static_cast<char*>(move.to);
    for (int64_t i = 0; i < move.count; ++i) {
      std::memcpy(
          to + i * move.to_stride * itemsize, from + i * move.from_stride * itemsize,
          static_cast<size_t>(move.length * itemsize));
    }
  }
}

bool can_scale(at::ScalarType dtype) {
  return with_number(dtype, [](auto) { return true; });
}

void scale(at::Device device, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves) {
  TORCH_INTERNAL_ASSERT(can_scale(from) && can_scale(to));
  if (device.is_cuda()) return cuda_library()->scale(device, from, to, factor, moves);
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  with_number(from, [&](auto a) {
    return with_number(to, [&](auto b) {
      using From = decltype(a);
      using To = decltype(b);
      const auto by = static_cast<Both<From, To>>(factor);
      for (const auto& move : moves) {
        for (int64_t run = 0; run < move.count; ++run) {
          const auto* source = static_cast<const From*>(move.from) + run * move.from_stride;
          auto* target = static_cast<To*>(move.to) + run * move.to_stride;
          for (int64_t i = 0; i < move.length; ++i) target[i] = scaled<From, To>(source[i], by);
        }
      }
      return true;
    });
  });
}

} // namespace shardwise::kernels
