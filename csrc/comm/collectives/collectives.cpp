#include "comm/collectives/collectives.h"

#include "base/caller.h"
#include "base/ends_within.h"
#include "base/reason.h"
#include "base/torch_versions.h"
#include "comm/mesh/device_backend.h"
#include "observe/record.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

namespace shardwise::comm {
namespace {

constexpr std::chrono::milliseconds kFirstCheck = std::chrono::seconds(1);
constexpr std::chrono::milliseconds kNextCheck = std::chrono::milliseconds(200);

/// What the error of a collective says, and whether that is the cause.
struct Why {
  std::string text;
  bool is_cause = true;
};

// Our transport's errors say what happened; torch's only say that something did.
Why why_of(const std::exception& error) {
  return {base::reason(error), base::text_of(error).starts_with("shardwise: ")};
}

[[noreturn]] void fail(
    const CollectiveName& what, int64_t rank, const Why& why, const Agreement::Position& position = {}) {
  const auto cause = position.agreement ? position.agreement->cause_of_failure(position) : "";
  auto text = c10::str("shardwise: rank ", rank, ": ", what(), " failed");
  if (!cause.empty()) {
    text += ", because " + cause + " Details: ";
  } else if (why.is_cause) {
    text += ". The reason: ";
  } else {
    text +=
        ". Look for the error of another rank first: it may have died, or run other units. If there is none, a rank is "
        "slower than the timeout. Details: ";
  }
  text += why.text;
  if (position.agreement) position.agreement->fail(text);
  throw PeerError(text);
}

at::Tensor flat_view(const at::Tensor& tensor) {
  return tensor.dim() == 1 ? tensor : tensor.view({-1});
}

/// Ends the span when the work is done. If the work has no future, the wait ends it.
void end_with(const std::shared_ptr<observe::Span>& span, c10d::Work& work) {
  try {
    if (const auto future = work.getFuture()) future->addCallback([span](c10::ivalue::Future&) { span->end(); });
  } catch (const std::exception& error) {
    TORCH_WARN_ONCE(
        "shardwise: this back end's works have no future, so a record shows its collectives as running until they are "
        "waited for: ",
        base::reason(error));
  }
}

} // namespace

Pending::Pending(
    c10::intrusive_ptr<c10d::Work> work, CollectiveName what, int64_t rank, Agreement::Position position,
    bool in_stream)
    : work_(std::move(work)),
      what_(std::move(what)),
      rank_(rank),
      position_(std::move(position)),
      in_stream_(in_stream) {}

Pending::~Pending() {
  if (work_ && in_stream_ && !waited_) wait_noexcept();
}

void Pending::wait() {
  if (!work_) return;
  waited_ = true;
  const base::WithoutCallerLock unlocked;
  std::optional<observe::Span> waiting;
  if (observe::recording()) waiting.emplace("wait", what_(), rank_);
  Why reason{.text = "it was aborted"};
  try {
    if (position_.agreement ? wait_and_check_peers() : work_->wait()) {
      if (span_) span_->end();
      return;
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    reason = why_of(error);
  }
  fail(what_, rank_, reason, position_);
}

bool Pending::done() const {
  using namespace std::chrono_literals;
  if (!work_ || in_stream_) return true;
  return ended_.valid() ? ended_.wait_for(0ms) == std::future_status::ready : work_->isCompleted();
}

bool Pending::wait_noexcept() noexcept {
  try {
    wait();
    return true;
  } catch (...) {
    return false;
  }
}

// A work may have no time limit of its own. If it has one, its error says more, so it gets a few seconds of grace.
bool Pending::wait_and_check_peers() {
  constexpr std::chrono::seconds kGrace{5};
  auto& agreement = *position_.agreement;
  const auto deadline = std::chrono::steady_clock::now() + agreement.timeout() + kGrace;
  for (auto slice = kFirstCheck;; slice = kNextCheck) {
    const bool ends =
        ended_.valid() ? ended_.wait_for(slice) == std::future_status::ready : base::ends_within(*work_, slice);
    if (ends) return work_->wait();
    agreement.check_peers(position_, what_());
    if (std::chrono::steady_clock::now() < deadline) continue;
    throw std::runtime_error(c10::str("it did not end within ", agreement.timeout().count(), " ms"));
  }
}

Collectives::Collectives(AxisGroup line) : line_(std::move(line)) {
  if (!line_.group) return;
  rank_ = line_.group->getRank();
  size_ = line_.group->getSize();
}

Collectives Collectives::at(Agreement::Position position) const {
  auto placed = *this;
  placed.position_ = std::move(position);
  return placed;
}

Collectives Collectives::by(Custom custom) const {
  auto other = *this;
  other.custom_ = std::move(custom);
  return other;
}

// Without the caller's lock: to start a collective may need a mutex that a thread of torch's holds while it waits for
// that lock, to let go of what it finished.
template <typename Call>
Pending Collectives::launch(
    const char* kind, const Call& call, const at::Tensor& tensor, CollectiveName what, int64_t& calls,
    Counters& counters) const {
  base::require_not_forked(forks_, "this unit");
  ++calls;
  counters.collective_bytes += static_cast<int64_t>(tensor.nbytes());
  const auto here = line_.ranks[rank()];
  std::shared_ptr<observe::Span> span;
  if (observe::recording()) span = std::make_shared<observe::Span>(kind, what(), here, tensor.nbytes());
  try {
    const bool in_stream = wait_in_stream(tensor.device());
    auto work = [&] {
      const base::WithoutCallerLock unlocked;
      return call();
    }();
    Pending pending(std::move(work), std::move(what), here, in_stream ? Agreement::Position() : position_, in_stream);
    if (span && pending.work_ && !in_stream) {
      end_with(span, *pending.work_);
      pending.span_ = std::move(span);
    }
    return pending;
  } catch (const std::exception& error) {
    fail(what, line_.ranks[rank()], why_of(error));
  }
}

Pending Collectives::all_reduce(
    const at::Tensor& tensor, CollectiveName what, Counters& counters, c10d::ReduceOp::RedOpType op) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  const auto call = [&] { return line_.group->allreduce(tensors, options); };
  return launch("all-reduce", call, tensor, std::move(what), counters.all_reduces, counters);
}

Pending Collectives::broadcast(const at::Tensor& tensor, int root, CollectiveName what, Counters& counters) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  const auto call = [&] { return line_.group->broadcast(tensors, options); };
  return launch("broadcast", call, tensor, std::move(what), counters.broadcasts, counters);
}

Collectives Collectives::in_own_memory() const {
  auto other = *this;
  other.in_own_memory_ = true;
  return other;
}

bool Collectives::has_memory(at::Device device) const {
  const auto backend = line_.group ? backend_of(*line_.group, device.type()) : nullptr;
  return backend && backend->supportsTensorAlloc(device.index());
}

at::Tensor Collectives::allocate(int64_t bytes, at::Device device) const {
  const auto options = at::TensorOptions().device(device).dtype(at::kByte);
  return backend_of(*line_.group, device.type())->allocateTensor(bytes, options).zero_();
}

bool Collectives::wait_in_stream(at::Device device) const {
  return !device.is_cpu() && line_.group && waits_in_stream(*line_.group, device.type());
}

bool Collectives::can_place() const {
  if (custom_ || !line_.group) return false;
  const auto backend = backend_of(*line_.group, c10::kCPU);
  return backend && !transport::transport_name(*backend).empty();
}

Pending Collectives::all_gather(
    const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters,
    const transport::DirectPlacement* placement) const {
  const transport::DirectPlacementScope scope(placement);
  auto flat = flat_view(output);
  auto input = flat_view(tensor);
  const auto call = [&] {
    if (custom_) return custom_(flat, input, *line_.group);
    return base::all_gather(*line_.group, flat, input);
  };
  return launch("all-gather", call, tensor, std::move(what), counters.all_gathers, counters);
}

Pending Collectives::reduce_scatter(
    const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters) const {
  auto flat = flat_view(output);
  auto input = flat_view(tensor);
  const auto call = [&] {
    if (custom_) return custom_(flat, input, *line_.group);
    return base::reduce_scatter(*line_.group, flat, input);
  };
  auto pending = launch("reduce-scatter", call, tensor, std::move(what), counters.reduce_scatters, counters);
  const auto& agreement = pending.position_.agreement;
  if (agreement && pending.work_) {
    pending.ended_ = agreement->background().add([work = pending.work_]() mutable {
      // Let go before anybody hears of the end, since it holds the memory of tensors.
      std::exchange(work, {})->wait();
    });
  }
  return pending;
}

} // namespace shardwise::comm
