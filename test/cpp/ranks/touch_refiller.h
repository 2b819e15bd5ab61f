#pragma once

#include "base/compute_guard.h"
#include "group/leaf_storage.h"
#include "nn/touch/touch.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

namespace shardwise::nn::test {

using Tensors = std::vector<at::Tensor>;

/// Keeps the values of some tensors elsewhere, as an engine that shards does: the tensors become views of one buffer
/// whose memory is freed, and comes back with the values at the first touch.
class Refiller : public TouchListener {
 public:
  explicit Refiller(Tensors leaves) : leaves_(std::move(leaves)) {
    at::NoGradGuard no_grad;
    Tensors parts;
    for (const auto& leaf : leaves_) parts.push_back(leaf.reshape(-1));
    values_ = at::cat(parts).clone();
    storage_.emplace(values_.sizes(), values_.options());
    buffer_ = storage_->alias();
    int64_t offset = 0;
    for (auto& leaf : leaves_) {
      leaf.set_data(buffer_.narrow(0, offset, leaf.numel()).view(leaf.sizes()));
      offset += leaf.numel();
      add_touch_key(leaf);
    }
    storage_->free();
  }

  static std::shared_ptr<Refiller> watch(Tensors leaves) {
    auto refiller = std::make_shared<Refiller>(std::move(leaves));
    refiller->registration = TouchRegistration(refiller->buffer_, refiller);
    return refiller;
  }

  bool touched(const Touch& touch) override {
    touches.push_back(touch.operation.operator_name().name + (touch.written ? " writes" : ""));
    if (!refills || !storage_->freed()) return false;
    const base::ComputeGuard guard;
    storage_->refill(at::zeros({static_cast<int64_t>(storage_->bytes())}, values_.options().dtype(at::kByte)));
    storage_->alias().copy_(values_);
    ++refilled;
    return false;
  }

  /// Clears the memory too: the allocator may give the same piece again.
  void free() {
    if (storage_->freed()) return;
    const base::ComputeGuard guard;
    storage_->alias().zero_();
    storage_->free();
  }

  std::vector<std::string> touches;
  bool refills = true;
  int refilled = 0;
  TouchRegistration registration;

 private:
  Tensors leaves_;
  at::Tensor values_;
  at::Tensor buffer_;
  std::optional<group::LeafStorage> storage_;
};

} // namespace shardwise::nn::test
