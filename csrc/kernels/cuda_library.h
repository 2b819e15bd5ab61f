#pragma once

#include "kernels/moves.h"

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

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
  virtual bool is_capturing(const c10::Stream& stream) const = 0;
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

/// Whether what is issued on the stream is captured into a graph. The streams of newer torches can tell; with older
/// ones the CUDA runtime is asked.
bool is_capturing(const c10::Stream& stream);

} // namespace shardwise::kernels
