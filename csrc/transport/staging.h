#pragma once

#include "base/gate.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace shardwise::transport {

/// Takes collectives of a device's tensors through pinned memory of the host. The copies run on two streams of its own:
/// one takes out what is sent, the other brings back what came, behind a gate that opens when the host is done. So the
/// program's thread and streams never wait for the host before Work::wait(), and only the streams do then.
class Staging {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Works = c10::intrusive_ptr<c10d::Work>;

  explicit Staging(c10::Device device);
  ~Staging();

  /// The copies of a collective's tensors in the host's memory.
  class Copies {
   public:
    /// Pairs of a tensor and its copy.
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    const at::Tensor& of(const at::Tensor& tensor) const;
    Tensors of(const Tensors& tensors) const;
    std::vector<Tensors> of(const std::vector<Tensors>& lists) const;
  };
  struct Calls {
    /// Whoever carries the copies may not begin before `ready` returns; it waits on the host, and may raise.
    std::function<void(std::function<void()> ready)> wait_first;
    /// Starts the collective with the copies.
    std::function<Works(const Copies& copies)> start;
  };
  /// The collective reads `reads` and writes `writes`.
  Works carry(c10d::OpType type, const Tensors& reads, const Tensors& writes, const Calls& calls);

 private:
  class StagedWork;
  class Failure;
  /// What lives until the streams are past it.
  struct Landing {
    c10::Event landed;
    std::mutex mutex;
    Tensors kept;
    explicit Landing(c10::DeviceType device) : landed(device) {}
  };
  std::vector<std::shared_ptr<Landing>> take_what_landed();

  const int64_t forks_;
  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
  const std::shared_ptr<base::Gate> gate_;
  const std::shared_ptr<Failure> failure_;
  std::mutex mutex_;
  uint32_t number_ = 0;
  std::deque<std::shared_ptr<Landing>> landings_;
};

} // namespace shardwise::transport
