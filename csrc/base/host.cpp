#include "base/host.h"

#include <c10/util/StringUtil.h>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

// Headers of older systems lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace shardwise::base {

// Includes the namespace, because process numbers mean something only within it.
std::string this_host() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::error_code ignored;
  return c10::str(boot, " ", std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string());
}

uint64_t process_start_time(int64_t process) {
  std::ifstream file(c10::str("/proc/", process, "/stat"));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // The second field is a name, in brackets, that may have anything in it; the time is the twentieth after it.
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

Descriptor watch_process(int64_t process) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
}

bool process_ended(const Descriptor& watched) {
  pollfd end{.fd = watched.get(), .events = POLLIN, .revents = 0};
  return poll(&end, 1, 0) > 0;
}

} // namespace shardwise::base
