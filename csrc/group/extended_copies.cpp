#include "group/extended_copies.h"

#include "base/compute_guard.h"
#include "group/data.h"

#include <shardwise/error.h>

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

namespace shardwise::group {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.contiguous().view(-1).view(at::kByte);
}

std::pair<at::ScalarType, at::Device> stored_kind_of(const Parameter* parameter) {
  const auto stored = parameter->stored();
  return {stored.scalar_type(), stored.device()};
}

} // namespace

ExtendedCopies::ExtendedCopies(std::vector<Parameter*> parameters, int64_t world, at::Device device)
    : Copies(std::move(parameters)),
      world_(world),
      device_(device) {
  for (const auto* parameter : this->parameters()) {
    kinds_.push_back(stored_kind_of(parameter));
    // Until make_full() gives another leaf, this one says on which device gradients arrive.
    const auto full = parameter->full();
    if (!full.is_meta() || device_.is_meta()) continue;
    LeafStorage storage(full.sizes(), full.options().requires_grad(false).device(device_));
    replace_data(full, storage.alias());
    storage.free();
  }
}

bool ExtendedCopies::fits() const {
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (!parameters()[i]->extension() || stored_kind_of(parameters()[i]) != kinds_[i]) return false;
  }
  return true;
}

void ExtendedCopies::lay_out() {
  int64_t start = 0;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    for (const auto& input : inputs_[i]) {
      auto sizes = input.sizes().vec();
      if (sizes.empty()) sizes.push_back(1);
      auto joined = sizes;
      joined.front() *= world_;
      const auto bytes = static_cast<int64_t>(input.numel() * input.element_size());
      const auto options = at::TensorOptions().dtype(input.scalar_type()).device(device_);
      outputs_.push_back({i, input.sizes().vec(), input.scalar_type(), start, bytes, LeafStorage(joined, options)});
      outputs_.back().storage.free();
      start += static_cast<int64_t>(layout::aligned(static_cast<size_t>(bytes)));
    }
  }
  part_ = start;
}

void ExtendedCopies::check() const {
  size_t next = 0;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    for (const auto& input : inputs_[i]) {
      if (next < outputs_.size() && outputs_[next].parameter == i && input.sizes() == outputs_[next].input_sizes &&
          input.scalar_type() == outputs_[next].dtype) {
        ++next;
        continue;
      }
      throw ValueError(c10::str(
          "shardwise: fsdp_pre_all_gather() of '", parameters()[i]->name(), "' returned a tensor of sizes ",
          input.sizes(), " and dtype ", c10::getDtypeNames(input.scalar_type()).first,
          ", unlike its first call. Return tensors of the same sizes and dtypes each time: the full parameter "
          "keeps their memory."));
    }
  }
  if (next == outputs_.size()) return;
  throw ValueError(c10::str(
      "shardwise: fsdp_pre_all_gather() of '", parameters()[outputs_[next].parameter]->name(),
      "' returned fewer tensors than its first call. Return the same number each time: the full parameter keeps their "
      "memory."));
}

void ExtendedCopies::prepare() {
  if (!must_gather()) return;
  inputs_.clear();
  {
    // No ComputeGuard: this is the user's code, which gets all of torch.
    const c10::AutoGradMode no_grad(false);
    for (const auto* parameter : parameters()) inputs_.push_back(parameter->extension()->inputs());
  }
  outputs_.empty() ? lay_out() : check();
}

void ExtendedCopies::provide(
    bool /*from_held*/, bool /*may_hold*/, const comm::Collectives& collectives, comm::Buffers& buffers,
    Counters& counters) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  sent_ = buffers.take(part_, options, counters, collectives.memory());
  size_t next = 0;
  for (const auto& own : std::exchange(inputs_, {})) {
    for (const auto& input : own) {
      const auto& output = outputs_[next++];
      sent_.narrow(0, output.start, output.bytes).copy_(bytes_of(input), /*non_blocking=*/true);
    }
  }
  counters.unsharded_bytes += part_;
  gathered_ = world_ == 1 ? sent_ : buffers.take(world_ * part_, options, counters, collectives.memory());
}

void ExtendedCopies::start(
    const comm::Collectives& collectives, comm::Buffers& /*buffers*/, const std::string& unit, Counters& counters) {
  if (world_ > 1) pending_ = collectives.all_gather(gathered_, sent_, named(unit), counters);
}

void ExtendedCopies::copy_out(int64_t /*holders*/, comm::Buffers& buffers, Counters& counters) {
  copy_outputs(buffers, counters);
  make_full();
}

void ExtendedCopies::copy_outputs(comm::Buffers& buffers, Counters& counters) {
  const base::ComputeGuard compute;
  size_t bytes = 0;
  for (const auto& output : outputs_) bytes += layout::aligned(output.storage.bytes());
  if (!memory_.defined()) {
    memory_ = buffers.take(static_cast<int64_t>(bytes), at::TensorOptions().dtype(at::kByte).device(device_), counters);
  }
  const auto ranks = gathered_.view({world_, part_});
  size_t offset = 0;
  for (auto& output : outputs_) {
    output.storage.refill(memory_, offset);
    offset += layout::aligned(output.storage.bytes());
    output.storage.alias()
        .view(-1)
        .view(at::kByte)
        .view({world_, output.bytes})
        .copy_(ranks.narrow(1, output.start, output.bytes));
  }
  counters.unsharded_bytes += static_cast<int64_t>(gathered_.nbytes());
}

void ExtendedCopies::make_full() {
  const c10::AutoGradMode no_grad(false);
  size_t next = 0;
  for (size_t i = 0; i < parameters().size(); ++i) {
    std::vector<at::Tensor> joined;
    for (; next < outputs_.size() && outputs_[next].parameter == i; ++next) {
      joined.push_back(outputs_[next].storage.alias());
    }
    const auto before = parameters()[i]->leaf();
    auto made = parameters()[i]->extension()->make_full(joined);
    if (made) parameters()[i]->replace_leaf(made->leaf, std::move(made->full));
  }
}

void ExtendedCopies::free_leaves() {
  for (auto& output : outputs_) output.storage.free();
  for (const auto* parameter : parameters()) parameter->extension()->free();
}

} // namespace shardwise::group
