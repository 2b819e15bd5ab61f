#include "comm/second_group.h"

#include "base/caller_lock.h"
#include "base/reason.h"
#include "comm/patience.h"
#include "comm/rendezvous.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace shardwise::comm {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A tag that no program uses.
constexpr int kHello = 0x7f000000;

/// Every rank sends every other one a message, so that each finds out for itself whose connection is closed.
void greet(c10d::Backend& gloo, const std::function<int64_t(int)>& name_of, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const auto others = gloo.getSize() - 1;
  const auto peer = [&](int step) { return (gloo.getRank() + 1 + step % others) % gloo.getSize(); };
  std::vector<at::Tensor> mine{at::zeros({1}, at::kByte)};
  std::vector<std::vector<at::Tensor>> theirs;
  std::vector<WorkPtr> works;
  int current = 0;
  try {
    for (; current < others; ++current) {
      theirs.push_back({at::zeros({1}, at::kByte)});
      works.push_back(gloo.recv(theirs.back(), peer(current), kHello));
    }
    for (current = 0; current < others; ++current) works.push_back(gloo.send(mine, peer(current), kHello));
    for (current = 0; current < 2 * others; ++current) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      works[current]->wait(std::max(left, std::chrono::milliseconds(1)));
    }
  } catch (const std::exception& error) {
    throw std::runtime_error(c10::str("rank ", name_of(peer(current)), " does not answer: ", base::reason(error)));
  }
}

/// "" if the group has none for these devices.
std::string name_of_backend(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  if (!group.hasBackends() || std::find(types.begin(), types.end(), device) == types.end()) return "";
  return group.getBackend(device)->getBackendName();
}

/// Returns when all ranks of a group have come here, if its back end can tell.
void wait_for_all(
    c10d::ProcessGroup& group, const std::function<int64_t(int)>& name_of, std::chrono::milliseconds timeout) {
  const auto name = name_of_backend(group, c10::kCPU);
  if (name.empty()) return;
  const auto backend = group.getBackend(c10::kCPU);
  if (!transport::way_of(*backend).empty()) {
    c10d::BarrierOptions options;
    options.timeout = timeout;
    backend->barrier(options)->wait();
  } else if (name == "gloo") {
    greet(*backend, name_of, timeout);
  }
}

} // namespace

SecondGroup make_beside(c10d::ProcessGroup& first, Ranks names, GroupSpec spec) {
  const base::WithoutCallerLock unlocked;
  if (spec.device.is_cuda()) spec.nccl = name_of_backend(first, c10::kCUDA);
  try {
    // Owns a reference, because the waiting thread may be left behind.
    const auto group_before = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&first);
    patiently(spec.connect_timeout, spec.look, [group_before, names, limit = spec.connect_timeout] {
      wait_for_all(
          *group_before, [names](int position) { return names[position]; }, limit);
      return true;
    });
    auto roll = patiently(spec.connect_timeout, spec.look, [spec] {
      return call_the_roll(spec, Processes::card(spec.name_of(spec.rank)));
    });
    spec.store = std::move(roll.store);
    spec.processes = Processes(roll.texts);
    auto group = make_process_group(spec);
    patiently(spec.connect_timeout, spec.look, [spec] {
      meet(spec);
      return true;
    });
    return {.group = std::move(group), .processes = std::move(spec.processes)};
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError(c10::str(
        "shardwise: ", spec.me(), " could not make the process group '", spec.name, "' with the other ranks within ",
        spec.connect_timeout.count(),
        " ms. Look for the error of another rank first; if there is none, one runs something else. Details: ",
        base::reason(error)));
  }
}

} // namespace shardwise::comm
