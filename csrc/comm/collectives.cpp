#include "comm/collectives.h"

#include "comm/reason.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <vector>

namespace shardwise::comm {
namespace {

[[noreturn]] void fail(const std::string& what, int rank, const std::string& reason_given) {
  throw PeerError(c10::str(
      "shardwise: rank ", rank, ": ", what,
      " failed. Either a rank died (look for its own error first), or the ranks do not run the same units in the same "
      "order, or one is slower than the timeout. The reason given: ",
      reason_given));
}

template <typename Launch>
Pending launch(Launch call, const at::Tensor& tensor, std::string what, int rank, int64_t& calls, Counters& counters) {
  ++calls;
  counters.collective_bytes += static_cast<int64_t>(tensor.nbytes());
  try {
    return {call(), std::move(what), rank};
  } catch (const std::exception& error) {
    fail(what, rank, reason(error));
  }
}

} // namespace

Pending::Pending(c10::intrusive_ptr<c10d::Work> work, std::string what, int rank)
    : work_(std::move(work)),
      what_(std::move(what)),
      rank_(rank) {}

void Pending::wait() {
  std::string reason_given = "it was aborted";
  try {
    if (work_->wait()) return;
  } catch (const std::exception& error) {
    reason_given = reason(error);
  }
  fail(what_, rank_, reason_given);
}

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

int Collectives::rank() const {
  return group_->getRank();
}

int Collectives::size() const {
  return group_->getSize();
}

Pending Collectives::all_reduce(const at::Tensor& tensor, std::string what, Counters& counters) const {
  std::vector<at::Tensor> tensors{tensor};
  const auto call = [&] { return group_->allreduce(tensors); };
  return launch(call, tensor, std::move(what), rank(), counters.all_reduces, counters);
}

Pending Collectives::broadcast(const at::Tensor& tensor, int root, std::string what, Counters& counters) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  const auto call = [&] { return group_->broadcast(tensors, options); };
  return launch(call, tensor, std::move(what), rank(), counters.broadcasts, counters);
}

Pending Collectives::all_gather(
    const at::Tensor& output, const at::Tensor& tensor, std::string what, Counters& counters) const {
  auto flat = output.view({-1});
  auto input = tensor.view({-1});
  const auto call = [&] { return group_->_allgather_base(flat, input); };
  return launch(call, tensor, std::move(what), rank(), counters.all_gathers, counters);
}

Pending Collectives::reduce_scatter(
    const at::Tensor& output, const at::Tensor& tensor, std::string what, Counters& counters) const {
  auto flat = output.view({-1});
  auto input = tensor.view({-1});
  const auto call = [&] { return group_->_reduce_scatter_base(flat, input); };
  return launch(call, tensor, std::move(what), rank(), counters.reduce_scatters, counters);
}

} // namespace shardwise::comm
