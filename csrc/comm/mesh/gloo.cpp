#include "base/reason.h"
#include "comm/meet/gloo_sockets.h"
#include "comm/mesh/process_group.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <sstream>

namespace shardwise::comm {

namespace {

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
      : ProcessGroupGloo(sockets.overhear(spec.store), spec.rank, spec.size, std::move(options)),
        sockets_(std::move(sockets)) {
    sockets_.close_doors();
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
