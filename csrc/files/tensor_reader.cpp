#include "files/tensor_reader.h"

#include "files/in_quotes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::files {

TensorReader::TensorReader(Disk& disk, std::string path, std::optional<FileRecord> record)
    : path_(std::move(path)),
      record_(std::move(record)),
      file_(disk.open(path_)) {
  const auto bytes = file_->size();
  if (record_ && bytes != record_->bytes) {
    throw Error(c10::str(
        "shardwise: ", path_, " has ", bytes, " bytes, but ", record_->bytes,
        " were saved: it was cut off, or written ", "by something else. ", kRemedy));
  }
  std::string start(static_cast<size_t>(std::min(bytes, kLengthBytes)), '\0');
  read_all(*file_, std::as_writable_bytes(std::span(start)), 0, path_);
  const auto length = header_length(start, bytes, path_);
  start.resize(static_cast<size_t>(kLengthBytes + length));
  const auto rest = std::as_writable_bytes(std::span(start)).subspan(kLengthBytes);
  read_all(*file_, rest, kLengthBytes, path_);
  header_bytes_ = kLengthBytes + length;
  data_bytes_ = bytes - header_bytes_;
  if (record_ && (header_bytes_ != record_->header_bytes || checksum(start) != record_->header_checksum)) {
    throw Error(c10::str(
        "shardwise: the header of ", path_, " (its bytes 0 to ", header_bytes_,
        ") is not what was saved: its checksum is another one. ", kRemedy));
  }
  header_ = parse_header(std::string_view(start).substr(kLengthBytes), data_bytes_, path_);
}

TensorReader::TensorReader(Disk& disk, std::string path)
    : path_(std::move(path)),
      file_(disk.open(path_)),
      data_bytes_(file_->size()) {}

int64_t TensorReader::length_of_block(int64_t block) const {
  return std::min(kBlockBytes, data_bytes_ - block * kBlockBytes);
}

void TensorReader::read_block(int64_t block, std::byte* place, const std::string& tensor) {
  const std::span bytes(place, static_cast<size_t>(length_of_block(block)));
  const auto first = header_bytes_ + block * kBlockBytes;
  read_all(*file_, bytes, first, path_);
  if (!record_ || checksum(bytes) == record_->blocks.at(static_cast<size_t>(block))) return;
  throw Error(c10::str(
      "shardwise: the values of ", in_quotes(tensor), " in ", path_, " are not what was saved: its bytes ", first,
      " to ", first + length_of_block(block), " have another checksum. ", kRemedy));
}

void TensorReader::read(int64_t offset, std::span<std::byte> memory, const std::string& tensor) {
  const auto count = static_cast<int64_t>(memory.size());
  if (offset < 0 || count > data_bytes_ || offset > data_bytes_ - count) {
    throw ValueError(c10::str(
        "shardwise: ", path_, " has no bytes ", offset, " to ", offset + count, " of data: it has ", data_bytes_, "."));
  }
  while (!memory.empty()) {
    const auto block = offset / kBlockBytes;
    const auto skipped = offset % kBlockBytes;
    const auto bytes = std::min(static_cast<int64_t>(memory.size()), length_of_block(block) - skipped);
    if (bytes == length_of_block(block)) {
      read_block(block, memory.data(), tensor);
    } else {
      if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(length_of_block(0)));
      if (buffered_ != block) {
        buffered_.reset();
        read_block(block, buffer_.get(), tensor);
        buffered_ = block;
      }
      std::copy_n(buffer_.get() + skipped, bytes, memory.data());
    }
    memory = memory.subspan(static_cast<size_t>(bytes));
    offset += bytes;
  }
}

} // namespace shardwise::files
