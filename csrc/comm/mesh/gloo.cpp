#include "base/forked.h"
#include "base/reason.h"
#include "comm/mesh/process_group.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <linux/filter.h>

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::comm {
namespace {

/// Finds the sockets of one Gloo. Gloo has no call for that, but its ranks exchange their listening addresses through
/// the store.
class GlooSockets {
 public:
  using Addresses = std::vector<sockaddr_storage>;

  /// Wraps the store for a Gloo that is about to be made, and notes the addresses that it writes and reads.
  c10::intrusive_ptr<c10d::Store> record_addresses(const c10::intrusive_ptr<c10d::Store>& store);

  /// Call this once all ranks are connected. From then on Gloo's listening sockets answer nobody, and a forked child
  /// closes its copies of the connections, so that peers notice at once when this process dies.
  void stop_accepting();

 private:
  class RecordingStore;
  struct SocketAddresses {
    std::mutex mutex;
    Addresses own;
    Addresses peers;
  };

  std::shared_ptr<SocketAddresses> addresses_ = std::make_shared<SocketAddresses>();
  std::unique_ptr<base::InForkedChild> in_child_;
};

using Value = std::vector<uint8_t>;
using Addresses = GlooSockets::Addresses;

/// Parses what Gloo writes about a rank: its host name, its listening address, both with their length before them, and
/// more.
std::optional<sockaddr_storage> address_in(const Value& value) {
  size_t at = 0;
  const auto length = [&]() -> std::optional<uint64_t> {
    uint64_t bytes = 0;
    if (value.size() - at < sizeof bytes) return std::nullopt;
    std::memcpy(&bytes, value.data() + at, sizeof bytes);
    at += sizeof bytes;
    return bytes <= value.size() - at ? std::optional(bytes) : std::nullopt;
  };
  const auto name = length();
  if (!name) return std::nullopt;
  at += *name;
  const auto bytes = length();
  sockaddr_storage address{};
  if (!bytes || *bytes < sizeof address) return std::nullopt;
  std::memcpy(&address, value.data() + at, sizeof address);
  const bool is_known = address.ss_family == AF_INET || address.ss_family == AF_INET6;
  return is_known ? std::optional(address) : std::nullopt;
}

bool same(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    const auto& left = reinterpret_cast<const sockaddr_in&>(a);
    const auto& right = reinterpret_cast<const sockaddr_in&>(b);
    return left.sin_port == right.sin_port && left.sin_addr.s_addr == right.sin_addr.s_addr;
  }
  const auto& left = reinterpret_cast<const sockaddr_in6&>(a);
  const auto& right = reinterpret_cast<const sockaddr_in6&>(b);
  return left.sin6_port == right.sin6_port &&
         std::memcmp(&left.sin6_addr, &right.sin6_addr, sizeof left.sin6_addr) == 0;
}

bool is_among(const Addresses& addresses, const sockaddr_storage& address) {
  return std::any_of(addresses.begin(), addresses.end(), [&](const auto& one) { return same(one, address); });
}

/// The address that a socket of this process is bound to or connected to; nothing for other descriptors.
std::optional<sockaddr_storage> ask(int file, int (*question)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (question(file, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  return address;
}

bool listens(int file) {
  int answer = 0;
  socklen_t size = sizeof answer;
  return getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &answer, &size) == 0 && answer != 0;
}

std::vector<int> descriptors() {
  std::vector<int> all;
  auto* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return all;
  while (const auto* entry = readdir(folder)) {
    const int file = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    if (entry->d_name[0] != '.' && file != dirfd(folder)) all.push_back(file);
  }
  closedir(folder);
  return all;
}

// Drops all packets, so that nobody who tries to connect gets an answer. Closing the socket would leave Gloo's own
// thread with one that is always ready.
void drop_packets(int file) {
  sock_filter drop[] = {{BPF_RET | BPF_K, 0, 0, 0}};
  const sock_fprog program{1, drop};
  setsockopt(file, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

class GlooSockets::RecordingStore : public c10d::PrefixStore {
 public:
  RecordingStore(const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<SocketAddresses> addresses)
      : PrefixStore("gloo", store),
        addresses_(std::move(addresses)) {}

  using PrefixStore::set;
  void set(const std::string& key, const Value& value) override {
    note(addresses_->own, value);
    PrefixStore::set(key, value);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) override {
    for (const auto& value : values) note(addresses_->own, value);
    PrefixStore::multiSet(keys, values);
  }
  Value get(const std::string& key) override {
    auto value = PrefixStore::get(key);
    note(addresses_->peers, value);
    return value;
  }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    auto values = PrefixStore::multiGet(keys);
    for (const auto& value : values) note(addresses_->peers, value);
    return values;
  }

 private:
  void note(Addresses& addresses, const Value& value) {
    const auto address = address_in(value);
    const std::lock_guard lock(addresses_->mutex);
    if (address) addresses.push_back(*address);
  }

  std::shared_ptr<SocketAddresses> addresses_;
};

c10::intrusive_ptr<c10d::Store> GlooSockets::record_addresses(const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<RecordingStore>(store, addresses_);
}

void GlooSockets::stop_accepting() {
  const std::lock_guard lock(addresses_->mutex);
  for (const int file : descriptors()) {
    const auto bound = listens(file) ? ask(file, getsockname) : std::nullopt;
    if (bound && is_among(addresses_->own, *bound)) drop_packets(file);
  }
  // One end of each connection has the address of a listening socket.
  in_child_ = std::make_unique<base::InForkedChild>([own = addresses_->own, peers = addresses_->peers] {
    for (const int file : descriptors()) {
      const auto bound = ask(file, getsockname);
      const auto other = ask(file, getpeername);
      if ((bound && is_among(own, *bound)) || (other && is_among(peers, *other))) close(file);
    }
  });
}

std::shared_ptr<gloo::transport::Device> device_of(const std::string& interface) {
  try {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  } catch (const std::exception& error) {
    throw ValueError(c10::str(
        "shardwise: the environment variable GLOO_SOCKET_IFNAME names the network interface '", interface,
        "', which cannot be used. Give names that `ip address` shows, with commas between them, or unset it. Details: ",
        base::reason(error)));
  }
}

/// Gloo, with a record of its sockets.
class Gloo : public c10d::ProcessGroupGloo {
 public:
  Gloo(GlooSockets sockets, const GroupSpec& spec, c10::intrusive_ptr<Options> options)
      : ProcessGroupGloo(sockets.record_addresses(spec.store), spec.rank, spec.size, std::move(options)),
        sockets_(std::move(sockets)) {
    sockets_.stop_accepting();
  }

 private:
  GlooSockets sockets_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const GroupSpec& spec) {
  // Gloo connects its ranks in the constructor, using the timeout of its operations.
  auto options = c10d::ProcessGroupGloo::Options::create(spec.connect_timeout);
  // The same variable that torch.distributed reads.
  if (const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME"); interfaces != nullptr && *interfaces != '\0') {
    std::istringstream names(interfaces);
    for (std::string name; std::getline(names, name, ',');) options->devices.push_back(device_of(name));
  } else {
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  auto backend = c10::make_intrusive<Gloo>(GlooSockets(), spec, std::move(options));
  backend->setTimeout(spec.timeout);
  return backend;
}

} // namespace shardwise::comm
