#include "comm/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <sstream>

namespace shardwise::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(const GroupSpec& spec) {
  // Gloo connects its ranks while it is made, with the timeout of its operations.
  auto options = c10d::ProcessGroupGloo::Options::create(spec.connect_timeout);
  // The same variable that torch.distributed reads.
  if (const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME"); interfaces != nullptr && *interfaces != '\0') {
    std::istringstream names(interfaces);
    for (std::string name; std::getline(names, name, ',');) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
  } else {
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(spec.store, spec.rank, spec.size, std::move(options));
  backend->setTimeout(spec.timeout);
  return backend;
}

} // namespace shardwise::comm
