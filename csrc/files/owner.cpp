#include "files/owner.h"

#include "base/fingerprint.h"
#include "base/host.h"
#include "files/checksum.h"

#include <c10/util/StringUtil.h>

#include <unistd.h>

#include <atomic>
#include <charconv>
#include <vector>

namespace shardwise::files {
namespace {

uint64_t host_number() {
  static const auto number = base::fingerprint(base::this_host());
  return number;
}

template <typename Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && !text.starts_with('-');
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
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= text.size();) {
    const auto end = std::min(text.find('-', at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  Owner owner;
  if (parts.size() != 4) return {};
  const auto host = parse_checksum(parts[0]);
  if (!host || !read_number(parts[1], owner.process) || !read_number(parts[2], owner.began) ||
      !read_number(parts[3], owner.count)) {
    return {};
  }
  owner.host = *host;
  return owner;
}

bool Owner::has_ended() const {
  return host == host_number() && base::process_start_time(process) != began;
}

} // namespace shardwise::files
