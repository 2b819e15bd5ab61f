#include "files/owner.h"

#include "base/fingerprint.h"
#include "base/host.h"
#include "files/checksum.h"

#include <c10/util/StringUtil.h>

#include <unistd.h>

#include <atomic>
#include <sstream>

namespace shardwise::files {
namespace {

uint64_t host_number() {
  static const auto number = base::fingerprint(base::this_host());
  return number;
}

} // namespace

Owner Owner::next() {
  static std::atomic<int64_t> count = 0;
  const auto process = getpid();
  return {.host = host_number(), .process = process, .began = base::process_start_time(process), .count = count++};
}

std::string Owner::text() const {
  return c10::str(checksum_text(host), "-", process, "-", began, "-", count);
}

std::optional<Owner> Owner::parse(std::string_view text) {
  Owner owner;
  char dash = 0;
  std::istringstream numbers{std::string(text)};
  numbers >> std::hex >> owner.host >> dash >> std::dec >> owner.process >> dash >> owner.began >> dash >> owner.count;
  // Whatever is not as text() writes it differs from that; but for signs.
  const bool is_one = owner.text() == text && owner.process >= 0 && owner.count >= 0;
  return is_one ? std::optional(owner) : std::nullopt;
}

bool Owner::has_ended() const {
  return host == host_number() && base::process_start_time(process) != began;
}

} // namespace shardwise::files
