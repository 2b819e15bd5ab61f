#include "comm/rendezvous/second_group.h"

#include "base/caller.h"
#include "base/on_host.h"
#include "base/reason.h"
#include "comm/mesh/device_backend.h"
#include "comm/rendezvous/call_with_timeout.h"
#include "comm/rendezvous/rendezvous.h"
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

using NameOf = std::function<int64_t(int)>;

/// A tag that no program uses.
constexpr int kHello = 0x7f000000;
/// The bytes of a message; an identity is shorter.
constexpr int64_t kMessage = 256;

at::Tensor message_of(const std::string& text) {
  auto message = at::zeros({kMessage}, base::on_host(at::kByte));
  std::copy_n(text.begin(), std::min<size_t>(text.size(), kMessage), message.mutable_data_ptr<uint8_t>());
  return message;
}

std::string text_of(const at::Tensor& message) {
  const auto* bytes = message.const_data_ptr<uint8_t>();
  return {bytes, std::find(bytes, bytes + message.numel(), 0)};
}

/// Every rank sends every other one its identity, so that each finds out for itself whose connection is closed. It
/// hears all others before it raises an error: a rank that leaves has then sent its own message, and does not count as
/// the one that is missing. Returns the identities of all.
std::vector<std::string> exchange_over_gloo(
    c10d::Backend& gloo, const std::string& identity, const NameOf& name_of, std::chrono::milliseconds timeout) {
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
  std::vector<at::Tensor> mine{message_of(identity)};
  std::vector<std::vector<at::Tensor>> theirs(gloo.getSize());
  std::vector<std::vector<WorkPtr>> works(gloo.getSize());
  for (int peer = 0; peer < gloo.getSize(); ++peer) {
    theirs[peer] = {message_of(identity)};
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
  std::vector<std::string> identities;
  for (const auto& message : theirs) identities.push_back(text_of(message.front()));
  if (missing.empty()) return identities;
  std::vector<std::string> names;
  for (const auto& [peer, reason] : missing) names.push_back(c10::str("rank ", name_of(peer)));
  throw std::runtime_error(c10::str(
      c10::Join(", ", names), missing.size() == 1 ? " does" : " do", " not answer: ", missing.begin()->second));
}

std::vector<std::string> gather_identities(
    c10d::Backend& transport, const std::string& identity, std::chrono::milliseconds timeout) {
  auto all = at::zeros({transport.getSize(), kMessage}, base::on_host(at::kByte));
  auto mine = message_of(identity);
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  transport._allgather_base(all, mine, options)->wait();
  std::vector<std::string> identities;
  for (const auto& message : all.unbind()) identities.push_back(text_of(message));
  return identities;
}

/// Returns the identities of all ranks of a group when all have come here; nothing if its back end cannot tell.
std::vector<std::string> exchange_identities(
    c10d::ProcessGroup& group, const NameOf& name_of, std::chrono::milliseconds timeout) {
  const auto backend = backend_of(group, c10::kCPU);
  if (!backend) return {};
  const auto identity = Processes::identity(name_of(group.getRank()));
  if (!transport::transport_name(*backend).empty()) return gather_identities(*backend, identity, timeout);
  if (backend->getBackendName() == "gloo") return exchange_over_gloo(*backend, identity, name_of, timeout);
  return {};
}

/// The processes of those ranks that make the group of `spec`, from the identities of all.
Processes members(const GroupSpec& spec, const Ranks& names, const std::vector<std::string>& identities) {
  std::vector<std::string> chosen;
  for (int position = 0; !identities.empty() && position < spec.size; ++position) {
    chosen.push_back(identities.at((spec.name_of(position) - names.first) / names.stride));
  }
  return Processes(chosen);
}

} // namespace

SecondGroup make_second_group(c10d::ProcessGroup& first, Ranks names, GroupSpec spec) {
  const base::WithoutCallerLock unlocked;
  if (!spec.device.is_cpu()) spec.device_backend = backend_of(first, spec.device.type());
  try {
    // Owns a reference, because the waiting thread may be left behind.
    const auto group_before = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&first);
    const auto identities =
        call_with_timeout(spec.connect_timeout, spec.look, [group_before, names, limit = spec.connect_timeout] {
          return exchange_identities(
              *group_before, [names](int position) { return names[position]; }, limit);
        });
    const auto processes = members(spec, names, identities);
    const auto look = [&] { spec.look_at(processes, "cannot make"); };
    auto joined = call_with_timeout(
        spec.connect_timeout, look, [spec] { return rendezvous(spec, Processes::identity(spec.name_of(spec.rank))); });
    spec.store = std::move(joined.store);
    spec.processes = Processes(joined.texts);
    auto group = make_process_group(spec);
    call_with_timeout(spec.connect_timeout, spec.look, [spec] { store_barrier(spec); });
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
