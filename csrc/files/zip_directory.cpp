#include "files/zip_directory.h"

#include "files/in_quotes.h"
#include "files/little_endian.h"
#include "files/tensor_header.h"

#include <c10/util/StringUtil.h>

#include <limits>
#include <string_view>
#include <utility>

namespace shardwise::files {
namespace {

using namespace std::string_view_literals;

// Each structure begins with such a mark, and has its first bytes in a fixed order.
constexpr auto kEndMark = "PK\x05\x06"sv;
constexpr int64_t kEndBytes = 22;
constexpr auto kLargeEndMark = "PK\x06\x06"sv;
constexpr int64_t kLargeEndBytes = 56;
constexpr auto kLocatorMark = "PK\x06\x07"sv;
constexpr int64_t kLocatorBytes = 20;
constexpr auto kEntryMark = "PK\x01\x02"sv;
constexpr size_t kEntryBytes = 46;
constexpr auto kHeaderMark = "PK\x03\x04"sv;
constexpr int64_t kHeaderBytes = 30;

/// A number that is too large for its 4 bytes says so, and follows in an extra field of this kind.
constexpr uint64_t kIsElsewhere = 0xffffffff;
constexpr uint64_t kLargeNumbers = 1;

constexpr uint64_t kEncrypted = 1;

/// A number of the archive, which is none where it is too large for any file.
int64_t number_at(std::string_view text, size_t at, size_t bytes) {
  const auto number = little_endian(text.substr(at, bytes));
  return number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ? -1 : static_cast<int64_t>(number);
}

/// The text of the extra field with large numbers.
std::string_view large_numbers(std::string_view extra) {
  while (extra.size() >= 4) {
    const auto bytes = static_cast<size_t>(number_at(extra, 2, 2));
    if (little_endian(extra.substr(0, 2)) == kLargeNumbers) return extra.substr(4, bytes);
    extra.remove_prefix(std::min(extra.size(), 4 + bytes));
  }
  return {};
}

} // namespace

void fail_torch_file(const std::string& path, const std::string& why) {
  throw Error(c10::str("shardwise: ", path, " is not a file of torch.save(), or is broken: ", why, ". ", kRemedy));
}

void ZipDirectory::fail(const std::string& why) const {
  fail_torch_file(path_, why);
}

std::string ZipDirectory::read(int64_t begin, int64_t bytes, const char* what) {
  if (begin < 0 || bytes < 0 || bytes > size_ || begin > size_ - bytes)
    fail(c10::str(what, " does not lie in its ", size_, " bytes"));
  std::string text(static_cast<size_t>(bytes), '\0');
  read_all(file_, std::as_writable_bytes(std::span(text)), begin, path_);
  return text;
}

ZipDirectory::ZipDirectory(DiskFile& file, std::string path) : file_(file), path_(std::move(path)), size_(file.size()) {
  const auto end = read(size_ - kEndBytes, kEndBytes, "the end of its directory");
  if (!end.starts_with(kEndMark)) fail("it does not end with the directory of a zip archive, or is cut off");
  auto bytes = number_at(end, 12, 4);
  auto begin = number_at(end, 16, 4);
  const auto before = size_ - kEndBytes - kLocatorBytes;
  const auto locator = before < 0 ? "" : read(before, kLocatorBytes, "its directory");
  if (locator.starts_with(kLocatorMark)) {
    const auto large = read(number_at(locator, 8, 8), kLargeEndBytes, "the end of its directory");
    if (!large.starts_with(kLargeEndMark)) fail("the end of its directory is not where it should be");
    bytes = number_at(large, 40, 8);
    begin = number_at(large, 48, 8);
  }
  if (bytes > kLongestHeader) fail(c10::str("its directory has ", bytes, " bytes, more than ", kLongestHeader));
  add_entries(read(begin, bytes, "its directory"));
}

void ZipDirectory::add_entries(const std::string& directory) {
  std::string_view rest = directory;
  while (!rest.empty()) {
    if (rest.size() < kEntryBytes || !rest.starts_with(kEntryMark)) fail("an entry of its directory is none");
    const auto name_bytes = static_cast<size_t>(number_at(rest, 28, 2));
    const auto extra_bytes = static_cast<size_t>(number_at(rest, 30, 2));
    const auto all_bytes = kEntryBytes + name_bytes + extra_bytes + static_cast<size_t>(number_at(rest, 32, 2));
    if (rest.size() < all_bytes) fail("an entry of its directory is cut off");
    auto large = large_numbers(rest.substr(kEntryBytes + name_bytes, extra_bytes));
    const auto number = [&](size_t at) {
      if (little_endian(rest.substr(at, 4)) != kIsElsewhere || large.size() < 8) return number_at(rest, at, 4);
      const auto found = number_at(large, 0, 8);
      large.remove_prefix(8);
      return found;
    };
    Entry entry;
    entry.bytes = number(24);
    const auto stored_bytes = number(20);
    entry.header = number(42);
    entry.is_plain = number_at(rest, 10, 2) == 0 && (static_cast<uint64_t>(number_at(rest, 8, 2)) & kEncrypted) == 0 &&
                     stored_bytes == entry.bytes;
    const std::string name(rest.substr(kEntryBytes, name_bytes));
    if (!entries_.emplace(name, entry).second) fail(c10::str("its directory has ", in_quotes(name), " twice"));
    rest.remove_prefix(all_bytes);
  }
}

FileRange ZipDirectory::range(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(c10::str("it has no ", in_quotes(name)));
  const auto& entry = found->second;
  if (!entry.is_plain) {
    throw Error(c10::str(
        "shardwise: ", path_, " cannot be read: its ", in_quotes(name),
        " is compressed or encrypted, which torch.save() does not do. Load it in Python, and save it again."));
  }
  const auto header = read(entry.header, kHeaderBytes, "an entry");
  const auto name_bytes = number_at(header, 26, 2);
  if (!header.starts_with(kHeaderMark) || read(entry.header + kHeaderBytes, name_bytes, "an entry") != name)
    fail(c10::str("its ", in_quotes(name), " is not where its directory says"));
  const auto begin = entry.header + kHeaderBytes + name_bytes + number_at(header, 28, 2);
  if (begin > size_ || entry.bytes < 0 || entry.bytes > size_ - begin)
    fail(c10::str("its ", in_quotes(name), " does not lie in its ", size_, " bytes"));
  return {begin, begin + entry.bytes};
}

} // namespace shardwise::files
