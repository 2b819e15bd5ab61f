#include "transport/transport.h"

#include "transport/backend.h"
#include "transport/same_host/exchange.h"
#include "transport/tcp/exchange.h"

#include <map>
#include <mutex>
#include <utility>

namespace shardwise::transport {
namespace {

/// All counts in this process. Never destroyed: a process group may outlive any static object.
struct Counts {
  std::mutex mutex;
  std::multimap<uint64_t, const IssueCount*> all;

  static Counts& get() {
    static auto* counts = new Counts;
    return *counts;
  }
};

std::vector<std::weak_ptr<WaitObserver>>& observers() {
  static thread_local std::vector<std::weak_ptr<WaitObserver>> all;
  return all;
}

thread_local const DirectPlacement* handed_over = nullptr;

} // namespace

IssueCount::IssueCount(uint64_t group) : group_(group) {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  counts.all.emplace(group, this);
}

IssueCount::~IssueCount() {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  std::erase_if(counts.all, [this](const auto& entry) { return entry.second == this; });
}

uint64_t IssueCount::next() {
  thread_ = std::this_thread::get_id();
  return ++count_;
}

std::optional<uint64_t> IssueCount::of(uint64_t group) {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  const auto [first, last] = counts.all.equal_range(group);
  const bool only = first != last && std::next(first) == last;
  for (auto entry = first; entry != last; ++entry) {
    if (only || entry->second->thread_ == std::this_thread::get_id()) return entry->second->count_.load();
  }
  return std::nullopt;
}

void WaitObserver::add_for_this_thread(std::weak_ptr<WaitObserver> observer) {
  auto& all = observers();
  std::erase_if(all, [](const auto& other) { return other.expired(); });
  all.push_back(std::move(observer));
}

void WaitObserver::wait(
    const std::function<ProgramCall()>& call, const std::function<bool(std::chrono::milliseconds)>& ends_within) {
  constexpr std::chrono::milliseconds kFirst{1000};
  constexpr std::chrono::milliseconds kNext{200};
  for (auto slice = kFirst; !ends_within(slice); slice = kNext) {
    for (const auto& one : std::vector(observers())) {
      if (const auto observer = one.lock()) observer->still_waiting(call());
    }
  }
}

DirectPlacementScope::DirectPlacementScope(const DirectPlacement* placement)
    : outer_(std::exchange(handed_over, placement)) {}

DirectPlacementScope::~DirectPlacementScope() {
  handed_over = outer_;
}

const DirectPlacement* DirectPlacementScope::current() {
  return handed_over;
}

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, BackendOptions options) {
  const auto [members, hosts, word] =
      same_host::HostGroup::discover(*gloo, options.shared_memory, options.host, options.connect_timeout);
  auto carrier = std::make_unique<Carrier>(std::move(gloo), std::move(options.names));
  std::unique_ptr<Exchange> exchange;
  if (members) {
    exchange = std::make_unique<same_host::SameHostExchange>(carrier->progress(), members);
  } else {
    exchange = std::make_unique<tcp::TcpExchange>(*carrier, hosts);
  }
  return c10::make_intrusive<Backend>(
      std::move(carrier), std::move(exchange), options.timeout, members ? "shared memory" : "TCP", word);
}

std::string transport_name(const c10d::Backend& backend) {
  const auto* ours = dynamic_cast<const Backend*>(&backend);
  return ours == nullptr ? "" : ours->transport_name();
}

} // namespace shardwise::transport
