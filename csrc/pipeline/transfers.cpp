#include "pipeline/transfers.h"

#include "base/caller_lock.h"
#include "base/compute_guard.h"
#include "base/on_host.h"
#include "base/reason.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace shardwise::pipeline {
namespace {

constexpr int64_t kTensors = 8;
constexpr int64_t kDims = 8;
constexpr int64_t kEntry = 3 + kDims;
constexpr int64_t kHeader = 2 + kTensors * kEntry;
/// Of a message: the header, then its tensors.
constexpr int kTags = 1 + static_cast<int>(kTensors);

/// What a message says first: whether its sender failed, the number of tensors, and of each what it is.
at::Tensor new_header() {
  return at::zeros({kHeader}, base::on_host(at::kLong));
}

void describe(const at::Tensor& tensor, int64_t* entry, const std::string& what) {
  if (!tensor.defined()) {
    entry[0] = -1;
    return;
  }
  if (tensor.dim() > kDims || tensor.layout() != at::kStrided) {
    throw ValueError(c10::str(
        "shardwise: ", what, ": a tensor between stages must be dense and have at most ", kDims,
        " dimensions; this one has sizes ", tensor.sizes(), " and layout ", tensor.layout(), "."));
  }
  entry[0] = static_cast<int64_t>(tensor.scalar_type());
  entry[1] = tensor.requires_grad() ? 1 : 0;
  entry[2] = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), entry + 3);
}

void await(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what) {
  const base::WithoutCallerLock unlocked;
  try {
    work->wait();
  } catch (const std::exception& error) {
    throw PeerError(c10::str("shardwise: ", what, " failed. The reason: ", base::reason(error)));
  }
}

} // namespace

void Transfers::Arriving::arrive() {
  for (const auto& work : std::exchange(works_, {})) await(work, what_);
}

Transfers::Tensors Transfers::Arriving::wait() {
  arrive();
  return std::move(tensors_);
}

void Transfers::start(const at::Tensor& tensor, int to, int tag, const std::string& what) {
  const auto text = c10::str("rank ", rank_, ": the sending of ", what);
  std::vector<at::Tensor> tensors{tensor};
  const base::WithoutCallerLock unlocked;
  try {
    sent_.push_back({group_->send(tensors, to, tag), tensor, text});
  } catch (const std::exception& error) {
    throw PeerError(c10::str("shardwise: ", text, " failed. The reason: ", base::reason(error)));
  }
}

void Transfers::send(const Tensors& tensors, int to, int number, const std::string& what) {
  if (static_cast<int64_t>(tensors.size()) > kTensors) {
    throw ValueError(c10::str(
        "shardwise: rank ", rank_, ": ", what, " has ", tensors.size(), " tensors; at most ", kTensors,
        " can go from stage to stage. Put some of them together."));
  }
  const auto header = new_header();
  auto* const values = header.mutable_data_ptr<int64_t>();
  values[1] = static_cast<int64_t>(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    describe(tensors[i], values + 2 + static_cast<int64_t>(i) * kEntry, c10::str("rank ", rank_, ": ", what));
  }
  start(header, to, number * kTags, what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    at::Tensor values_to_send;
    {
      const base::ComputeGuard guard;
      values_to_send = tensors[i].detach().to(device_).contiguous();
    }
    start(values_to_send, to, number * kTags + 1 + static_cast<int>(i), what);
  }
}

void Transfers::send_failure(int to, int number, const std::string& what) {
  const auto header = new_header();
  header.mutable_data_ptr<int64_t>()[0] = 1;
  start(header, to, number * kTags, what);
}

Transfers::Arriving Transfers::receive(int from, int number, const std::string& what) {
  Arriving arriving;
  arriving.what_ = c10::str("rank ", rank_, ": the arrival of ", what);
  const auto receive_into = [&](const at::Tensor& tensor, int tag) {
    std::vector<at::Tensor> tensors{tensor};
    const base::WithoutCallerLock unlocked;
    try {
      return group_->recv(tensors, from, tag);
    } catch (const std::exception& error) {
      throw PeerError(c10::str("shardwise: ", arriving.what_, " failed. The reason: ", base::reason(error)));
    }
  };
  const auto header = new_header();
  await(receive_into(header, number * kTags), arriving.what_);
  const auto* const values = header.const_data_ptr<int64_t>();
  arriving.failed_ = values[0] != 0;
  const base::ComputeGuard guard;
  for (int64_t i = 0; i < values[1]; ++i) {
    const auto* const entry = values + 2 + i * kEntry;
    arriving.requires_grad_.push_back(entry[0] >= 0 && entry[1] != 0);
    if (entry[0] < 0) {
      arriving.tensors_.emplace_back();
      continue;
    }
    const at::IntArrayRef sizes(entry + 3, static_cast<size_t>(entry[2]));
    const auto options = at::TensorOptions(device_).dtype(static_cast<at::ScalarType>(entry[0]));
    arriving.tensors_.push_back(at::empty(sizes, options));
    const auto& tensor = arriving.tensors_.back();
    if (tensor.numel() > 0) arriving.works_.push_back(receive_into(tensor, number * kTags + 1 + static_cast<int>(i)));
  }
  return arriving;
}

void Transfers::finish() {
  for (const auto& sent : std::exchange(sent_, {})) await(sent.work, sent.what);
}

} // namespace shardwise::pipeline
