#include "pipeline/transfers.h"

#include "base/caller.h"
#include "base/compute_guard.h"
#include "base/on_host.h"
#include "base/reason.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>

namespace shardwise::pipeline {
namespace {

constexpr int64_t kTensors = 8;
constexpr int64_t kDims = 8;
constexpr int64_t kEntry = 3 + kDims;
/// Places in the header: whether the sender failed, the number of tensors, and the rows of the batch's part.
constexpr int64_t kFailed = 0;
constexpr int64_t kCount = 1;
constexpr int64_t kRows = 2;
constexpr int64_t kEntries = 3;
constexpr int64_t kHeader = kEntries + kTensors * kEntry;
/// Tags of a message: the header, tensors of the expected sizes, and tensors of other sizes.
constexpr int kExpected = 1;
constexpr int kInstead = kExpected + static_cast<int>(kTensors);
constexpr int kTags = kInstead + static_cast<int>(kTensors);

/// The header of a message: the places above, then the dtype and sizes of each tensor.
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

const int64_t* entry_of(const int64_t* header, int64_t tensor) {
  return header + kEntries + tensor * kEntry;
}

/// Without what may differ while the tensors are alike.
MessageLayout layout_of(const at::Tensor& header) {
  const auto* const values = header.const_data_ptr<int64_t>();
  MessageLayout layout(values, values + kHeader);
  layout[kRows] = 0;
  for (int64_t i = 0; i < kTensors; ++i) layout[static_cast<size_t>(kEntries + i * kEntry + 1)] = 0;
  return layout;
}

/// Those of a process group, as long as it lives.
std::shared_ptr<MessageLayouts> layouts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  struct Known {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<MessageLayouts> layouts = std::make_shared<MessageLayouts>();
  };
  static std::mutex mutex;
  static auto* all = new std::vector<Known>;
  const std::lock_guard lock(mutex);
  std::erase_if(*all, [](const Known& known) { return known.group.expired(); });
  const auto known = std::find_if(
      all->begin(), all->end(), [&](const Known& each) { return each.group._unsafe_get_target() == group.get(); });
  if (known != all->end()) return known->layouts;
  return all->emplace_back(Known{.group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)}).layouts;
}

/// Makes a call that may fail because of another rank.
template <typename Call>
auto reach(const std::string& what, const Call& call) {
  const base::WithoutCallerLock unlocked;
  try {
    return call();
  } catch (const std::exception& error) {
    throw PeerError(c10::str("shardwise: ", what, " failed. The reason: ", base::reason(error)));
  }
}

void await(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what) {
  reach(what, [&] { work->wait(); });
}

} // namespace

Transfers::Transfers(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device, int64_t rank)
    : group_(std::move(group)),
      device_(device),
      rank_(rank),
      layouts_(layouts_of(group_)) {}

void Transfers::start(const at::Tensor& tensor, const Message& message, int tag) {
  const auto text = c10::str("rank ", rank_, ": the sending of ", message.what);
  std::vector<at::Tensor> tensors{tensor};
  sent_.push_back(
      {reach(text, [&] { return group_->send(tensors, message.peer, message.number * kTags + tag); }), tensor, text});
}

void Transfers::send(const Tensors& tensors, int64_t rows, const Message& message) {
  const auto what = c10::str("rank ", rank_, ": ", message.what);
  if (static_cast<int64_t>(tensors.size()) > kTensors) {
    throw ValueError(c10::str(
        "shardwise: ", what, " has ", tensors.size(), " tensors; at most ", kTensors,
        " can go from stage to stage. Put some of them together."));
  }
  const auto header = new_header();
  auto* const values = header.mutable_data_ptr<int64_t>();
  values[kCount] = static_cast<int64_t>(tensors.size());
  values[kRows] = rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    describe(tensors[i], values + kEntries + static_cast<int64_t>(i) * kEntry, what);
  }
  Tensors values_to_send;
  for (const auto& tensor : tensors) {
    const base::ComputeGuard guard;
    values_to_send.push_back(tensor.defined() ? tensor.detach().to(device_).contiguous() : tensor);
  }
  start(header, message, 0);
  auto layout = layout_of(header);
  auto& before = layouts_->sent[message.key()];
  const bool is_expected = !has_tags() || before.empty() || before == layout;
  if (!is_expected) start_all(room_for(before), message, kExpected);
  start_all(values_to_send, message, is_expected ? kExpected : kInstead);
  before = std::move(layout);
}

// A rank with room for tensors waits for some.
void Transfers::send_failure(const Message& message) {
  const auto header = new_header();
  header.mutable_data_ptr<int64_t>()[kFailed] = 1;
  start(header, message, 0);
  const auto before = layouts_->sent.find(message.key());
  if (has_tags() && before != layouts_->sent.end()) {
    start_all(room_for(before->second), message, kExpected);
  }
}

Transfers::Tensors Transfers::room_for(const MessageLayout& layout) const {
  const base::ComputeGuard guard;
  Tensors tensors;
  for (int64_t i = 0; i < (layout.empty() ? 0 : layout[kCount]); ++i) {
    const auto* const entry = entry_of(layout.data(), i);
    if (entry[0] < 0) {
      tensors.emplace_back();
      continue;
    }
    const at::IntArrayRef sizes(entry + 3, static_cast<size_t>(entry[2]));
    tensors.push_back(at::empty(sizes, at::TensorOptions(device_).dtype(static_cast<at::ScalarType>(entry[0]))));
  }
  return tensors;
}

void Transfers::start_all(const Tensors& tensors, const Message& message, int tag) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.numel() > 0) start(tensor, message, tag);
    ++tag;
  }
}

Transfers::Work Transfers::receive_into(const Arriving& arriving, const at::Tensor& tensor, int tag) const {
  std::vector<at::Tensor> tensors{tensor};
  const auto& message = arriving.message_;
  return reach(message.what, [&] { return group_->recv(tensors, message.peer, message.number * kTags + tag); });
}

void Transfers::receive_all(Arriving& arriving, const MessageLayout& layout, int tag) const {
  arriving.expected_ = layout;
  arriving.tensors_ = room_for(layout);
  for (const auto& tensor : arriving.tensors_) {
    if (tensor.defined() && tensor.numel() > 0) arriving.works_.push_back(receive_into(arriving, tensor, tag));
    ++tag;
  }
}

Transfers::Arriving Transfers::receive(Message message) {
  Arriving arriving;
  arriving.message_ = std::move(message);
  arriving.message_.what = c10::str("rank ", rank_, ": the arrival of ", arriving.message_.what);
  arriving.header_ = new_header();
  arriving.header_work_ = receive_into(arriving, arriving.header_, 0);
  if (!has_tags()) {
    read_header(arriving);
  } else if (const auto before = layouts_->received.find(arriving.message_.key()); before != layouts_->received.end()) {
    receive_all(arriving, before->second, kExpected);
  }
  return arriving;
}

void Transfers::read_header(Arriving& arriving) {
  if (!arriving.header_work_) return;
  await(std::exchange(arriving.header_work_, nullptr), arriving.message_.what);
  const auto* const values = arriving.header_.const_data_ptr<int64_t>();
  arriving.failed_ = values[kFailed] != 0;
  arriving.rows_ = values[kRows];
  if (arriving.failed_) return;
  for (int64_t i = 0; i < values[kCount]; ++i) {
    const auto* const entry = entry_of(values, i);
    arriving.requires_grad_.push_back(entry[0] >= 0 && entry[1] != 0);
  }
  auto layout = layout_of(arriving.header_);
  if (layout != arriving.expected_) {
    const bool has_room = !arriving.expected_.empty();
    for (const auto& work : std::exchange(arriving.works_, {})) await(work, arriving.message_.what);
    receive_all(arriving, layout, has_room ? kInstead : kExpected);
  }
  layouts_->received[arriving.message_.key()] = std::move(layout);
}

void Transfers::arrive(Arriving& arriving) {
  read_header(arriving);
  for (const auto& work : std::exchange(arriving.works_, {})) await(work, arriving.message_.what);
  if (arriving.failed_) arriving.tensors_.clear();
}

Transfers::Tensors Transfers::wait(Arriving& arriving) {
  arrive(arriving);
  return std::move(arriving.tensors_);
}

void Transfers::finish() {
  for (const auto& sent : std::exchange(sent_, {})) await(sent.work, sent.what);
}

} // namespace shardwise::pipeline
