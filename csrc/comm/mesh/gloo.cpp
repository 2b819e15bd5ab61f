#include "base/forked.h"
#include "base/reason.h"
#include "comm/mesh/process_group.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <linux/filter.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::comm {
namespace {

using Value = std::vector<uint8_t>;
/// Each as key_of() has it.
using Addresses = std::set<std::string>;

/// What tells an address from others: its port, and the address itself. "" for those of other families.
std::string key_of(const sockaddr_storage& address) {
  const auto bytes = [](const auto& part) { return std::string(reinterpret_cast<const char*>(&part), sizeof part); };
  if (address.ss_family == AF_INET) {
    const auto& own = reinterpret_cast<const sockaddr_in&>(address);
    return bytes(own.sin_port) + bytes(own.sin_addr);
  }
  if (address.ss_family == AF_INET6) {
    const auto& own = reinterpret_cast<const sockaddr_in6&>(address);
    return bytes(own.sin6_port) + bytes(own.sin6_addr);
  }
  return "";
}

/// Parses what Gloo writes about a rank: its host name, its listening address, both with their length before them, and
/// more. "" if it is something else.
std::string address_in(const Value& value) {
  size_t at = 0;
  const auto length = [&]() -> std::optional<uint64_t> {
    uint64_t bytes = 0;
    if (value.size() - at < sizeof bytes) return std::nullopt;
    std::memcpy(&bytes, value.data() + at, sizeof bytes);
    at += sizeof bytes;
    return bytes <= value.size() - at ? std::optional(bytes) : std::nullopt;
  };
  const auto name = length();
  if (!name) return "";
  at += *name;
  const auto bytes = length();
  sockaddr_storage address{};
  if (!bytes || *bytes < sizeof address) return "";
  std::memcpy(&address, value.data() + at, sizeof address);
  return key_of(address);
}

/// The address that a socket of this process is bound to or connected to; "" for other descriptors.
std::string ask(int file, int (*question)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  return question(file, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? key_of(address) : "";
}

bool listens(int file) {
  int answer = 0;
  socklen_t size = sizeof answer;
  return getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &answer, &size) == 0 && answer != 0;
}

std::vector<int> descriptors() {
  std::vector<int> all;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", failed)) {
    all.push_back(std::stoi(entry.path().filename()));
  }
  return all;
}

// Drops all packets, so that nobody who tries to connect gets an answer. Closing the socket would leave Gloo's own
// thread with one that is always ready.
void drop_packets(int file) {
  sock_filter drop[] = {{BPF_RET | BPF_K, 0, 0, 0}};
  const sock_fprog program{1, drop};
  setsockopt(file, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

/// Notes the addresses that Gloo's ranks exchange: Gloo has no call that tells its sockets.
class RecordingStore : public c10d::PrefixStore {
 public:
  explicit RecordingStore(const c10::intrusive_ptr<c10d::Store>& store) : PrefixStore("gloo", store) {}

  std::pair<Addresses, Addresses> own_and_peers() {
    const std::lock_guard lock(mutex_);
    return {own_, peers_};
  }

  using PrefixStore::set;
  void set(const std::string& key, const Value& value) override {
    note(own_, value);
    PrefixStore::set(key, value);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) override {
    for (const auto& value : values) note(own_, value);
    PrefixStore::multiSet(keys, values);
  }
  Value get(const std::string& key) override {
    auto value = PrefixStore::get(key);
    note(peers_, value);
    return value;
  }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    auto values = PrefixStore::multiGet(keys);
    for (const auto& value : values) note(peers_, value);
    return values;
  }

 private:
  void note(Addresses& addresses, const Value& value) {
    auto address = address_in(value);
    const std::lock_guard lock(mutex_);
    if (!address.empty()) addresses.insert(std::move(address));
  }

  std::mutex mutex_;
  Addresses own_;
  Addresses peers_;
};

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

/// Once all ranks are connected, Gloo's listening sockets answer nobody, and a forked child closes its copies of the
/// connections, so that peers notice at once when this process dies.
class Gloo : public c10d::ProcessGroupGloo {
 public:
  Gloo(const c10::intrusive_ptr<RecordingStore>& store, const GroupSpec& spec, c10::intrusive_ptr<Options> options)
      : ProcessGroupGloo(store, spec.rank, spec.size, std::move(options)) {
    stop_accepting(*store);
  }

 private:
  void stop_accepting(RecordingStore& store) {
    auto [own, peers] = store.own_and_peers();
    for (const int file : descriptors()) {
      if (listens(file) && own.contains(ask(file, getsockname))) drop_packets(file);
    }
    // One end of each connection has the address of a listening socket.
    in_child_ = std::make_unique<base::InForkedChild>([own = std::move(own), peers = std::move(peers)] {
      for (const int file : descriptors()) {
        if (own.contains(ask(file, getsockname)) || peers.contains(ask(file, getpeername))) close(file);
      }
    });
  }

  std::unique_ptr<base::InForkedChild> in_child_;
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
  auto backend = c10::make_intrusive<Gloo>(c10::make_intrusive<RecordingStore>(spec.store), spec, std::move(options));
  backend->setTimeout(spec.timeout);
  return backend;
}

} // namespace shardwise::comm
