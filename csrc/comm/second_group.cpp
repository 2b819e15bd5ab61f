#include "comm/second_group.h"

#include "base/caller_lock.h"
#include "base/on_host.h"
#include "base/reason.h"
#include "comm/patience.h"
#include "comm/rendezvous.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>

namespace shardwise::comm {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A tag that no program uses.
constexpr int kHello = 0x7f000000;

/// Every rank sends every other one a message, so that each finds out for itself whose connection is closed. It hears
/// everybody before it raises an error: whoever leaves has then sent its own message, and is not taken for the one that
/// is missing.
void greet(c10d::Backend& gloo, const std::function<int64_t(int)>& name_of, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::map<int, std::string> missing;
  const auto reach = [&](int peer, const std::function<void()>& call) {
    if (missing.contains(peer) || peer == gloo.getRank()) return;
    try {
      call();
    } catch (const std::exception& error) {
      missing.emplace(peer, base::reason(error));
    }
  };
  std::vector<at::Tensor> mine{at::zeros({1}, base::on_host(at::kByte))};
  std::vector<std::vector<at::Tensor>> theirs(gloo.getSize());
  std::vector<std::vector<WorkPtr>> works(gloo.getSize());
  for (int peer = 0; peer < gloo.getSize(); ++peer) {
    theirs[peer] = {at::zeros({1}, base::on_host(at::kByte))};
    reach(peer, [&] {
      works[peer].push_back(gloo.recv(theirs[peer], peer, kHello));
      works[peer].push_back(gloo.send(mine, peer, kHello));
    });
  }
  for (int peer = 0; peer < gloo.getSize(); ++peer) {
    reach(peer, [&] {
      for (const auto& work : works[peer]) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        work->wait(std::max(left, std::chrono::milliseconds(1)));
      }
    });
  }
  if (missing.empty()) return;
  std::vector<std::string> names;
  for (const auto& [peer, reason] : missing) names.push_back(c10::str("rank ", name_of(peer)));
  throw std::runtime_error(c10::str(
      c10::Join(", ", names), missing.size() == 1 ? " does" : " do", " not answer: ", missing.begin()->second));
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
  if (!spec.device.is_cpu()) spec.device_backend = name_of_backend(first, spec.device.type());
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
