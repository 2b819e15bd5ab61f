#include "files/tensor_writer.h"

#include "files/in_quotes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <memory>

namespace shardwise::files {
namespace {

/// Writes data block by block. A block that lies in one piece goes to the disk from where it is; others are put
/// together first, so that many small tensors are one large write.
class BlockWriter {
 public:
  BlockWriter(DiskFile& file, const std::string& path, FileRecord& record)
      : file_(file),
        path_(path),
        record_(record),
        longest_(static_cast<size_t>(std::min(kBlockBytes, record.bytes - record.header_bytes))) {}

  void add(Bytes bytes) {
    while (!bytes.empty()) {
      const auto count = std::min(bytes.size(), static_cast<size_t>(kBlockBytes) - filled_);
      const auto piece = bytes.first(count);
      bytes = bytes.subspan(count);
      if (count == kBlockBytes) {
        write(piece);
        continue;
      }
      if (!block_) block_ = std::make_unique_for_overwrite<std::byte[]>(longest_);
      std::copy(piece.begin(), piece.end(), block_.get() + filled_);
      filled_ += count;
      if (filled_ == kBlockBytes) finish();
    }
  }
  void finish() {
    if (filled_ > 0) write({block_.get(), filled_});
    filled_ = 0;
  }

 private:
  void write(Bytes block) {
    record_.blocks.push_back(checksum(block));
    write_all(file_, block, path_);
  }

  DiskFile& file_;
  const std::string& path_;
  FileRecord& record_;
  /// The bytes of the longest block.
  size_t longest_;
  std::unique_ptr<std::byte[]> block_;
  size_t filled_ = 0;
};

void check_bytes(const TensorToWrite& tensor, const TensorEntry& entry) {
  size_t bytes = 0;
  for (const auto& span : tensor.data) bytes += span.size();
  if (bytes == static_cast<size_t>(entry.end - entry.begin)) return;
  throw ValueError(c10::str(
      "shardwise: ", in_quotes(tensor.name), " cannot be saved: ", bytes, " bytes were given, but ",
      text_of(tensor.box), " in ", c10::toString(tensor.dtype), " has ", entry.end - entry.begin, "."));
}

} // namespace

FileRecord write_tensor_file(
    Disk& disk, const std::string& path, const std::vector<TensorToWrite>& tensors, FileKind kind) {
  std::vector<TensorEntry> entries;
  std::map<std::string_view, const TensorToWrite*> by_name;
  for (const auto& tensor : tensors) {
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .box = tensor.box});
    by_name.emplace(tensor.name, &tensor);
  }
  const auto header = make_header(entries, kind);
  for (const auto& entry : entries) check_bytes(*by_name.at(entry.name), entry);

  FileRecord record{
      .name = name_of(path),
      .bytes = static_cast<int64_t>(header.size()) + (entries.empty() ? 0 : entries.back().end),
      .header_bytes = static_cast<int64_t>(header.size()),
      .header_checksum = checksum(header),
      .blocks = {}};
  const auto file = disk.create(path);
  write_all(*file, std::as_bytes(std::span(header)), path);
  BlockWriter writer(*file, path, record);
  for (const auto& entry : entries) {
    for (const auto& span : by_name.at(entry.name)->data) writer.add(span);
  }
  writer.finish();
  file->sync();
  return record;
}

} // namespace shardwise::files
