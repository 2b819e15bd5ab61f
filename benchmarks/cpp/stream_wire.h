#pragma once

#include "wire.h"

#include <c10/core/Stream.h>

/// For tensors on a CUDA device: the link is a stream, on which a kernel spins for as long as the link is busy. The
/// device computes on meanwhile, but for the one thread that spins.
class StreamWire : public Wire {
 public:
  explicit StreamWire(c10::Device device);

 private:
  c10::intrusive_ptr<c10d::Work> carry(const Start& start, std::vector<at::Tensor> results, Seconds takes) override;

  c10::Stream link_;
  /// Of the kernel that spins.
  double cycles_per_second_;
};
