#pragma once

#include "kernels/moves.h"

#include <shardwise/detail/export.h>

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace shardwise::comm {
struct GroupSpec;
}

namespace shardwise::kernels {

/// What needs CUDA's and NCCL's own libraries (csrc/cuda). It is a library beside shardwise's, opened where torch is a
/// build for CUDA: with a torch for CPUs shardwise works without it.
class CudaLibrary {
 public:
  virtual c10::intrusive_ptr<c10d::Backend> make_nccl(const comm::GroupSpec& spec) const = 0;
  /// As the function below; nothing where it cannot tell.
  virtual std::optional<uint64_t> capture_of(const c10::Stream& stream) const = 0;
  /// Tries the kernels on a device that has an index. Returns "" or why they do not run there.
  virtual std::string why_no_kernels(at::Device device) const = 0;
  // As in moves.h, on a CUDA device.
  virtual void copy(at::Device device, int64_t itemsize, const std::vector<Move>& moves) const = 0;
  virtual void scale(
      at::Device device, at::ScalarType from, at::ScalarType to, double factor,
      const std::vector<Move>& moves) const = 0;

 protected:
  CudaLibrary() = default;
  ~CudaLibrary() = default;
  CudaLibrary(const CudaLibrary&) = delete;
  CudaLibrary& operator=(const CudaLibrary&) = delete;
};

/// Null if torch is a build for CPUs, or where shardwise was built without CUDA.
const CudaLibrary* cuda_library();

/// The capture of a graph that what is issued on the stream goes into: no two have the same number, and 0 is none.
using CaptureOf = uint64_t (*)(const c10::Stream& stream);
uint64_t capture_of(const c10::Stream& stream);
/// The streams of a device that is not CUDA's tell whether they are captured (with newer torches), but not by which
/// capture. From now on `capture_of` is asked, whatever the device.
SHARDWISE_API void ask_for_captures(CaptureOf capture_of);

} // namespace shardwise::kernels
