// How fast a file of a checkpoint is written and read, beside the same bytes without a format and without checksums.
//
//   checkpoint_files FOLDER [MIB [ROUNDS]]
//
// All of them take turns. "plain" writes as `dd bs=4M conv=fsync` does, and reads whole blocks; what is read lies in
// the system's memory, so reading shows what verifying costs. Prints GB/s of the fastest turn.
#include "files/saved_folder.h"
#include "files/saving.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>

namespace {

using namespace shardwise::files;

constexpr size_t kMib = size_t{1} << 20;

void write_plain(Disk& disk, const std::string& path, Bytes bytes) {
  const auto file = disk.create(path);
  for (size_t at = 0; at < bytes.size(); at += 4 * kMib)
    write_all(*file, bytes.subspan(at, std::min(4 * kMib, bytes.size() - at)), path);
  file->sync();
}

void read_plain(Disk& disk, const std::string& path, std::span<std::byte> memory) {
  const auto file = disk.open(path);
  for (size_t at = 0; at < memory.size(); at += 4 * kMib)
    read_all(*file, memory.subspan(at, std::min(4 * kMib, memory.size() - at)), static_cast<int64_t>(at), path);
}

/// Tensors of 1 to 64 MiB and many small ones, as a model has them.
std::vector<TensorToWrite> tensors_of(Bytes bytes) {
  std::vector<TensorToWrite> tensors;
  size_t size = 64 * kMib;
  for (size_t at = 0; at < bytes.size(); at += size) {
    size =
        std::min(tensors.size() % 10 == 9 ? size_t{4096} : (size_t{1} << tensors.size() % 7) * kMib, bytes.size() - at);
    tensors.push_back(
        {.name = "layer." + std::to_string(tensors.size()),
         .dtype = c10::ScalarType::Byte,
         .box = Box::whole({static_cast<int64_t>(size)}),
         .data = {bytes.subspan(at, size)}});
  }
  return tensors;
}

void load(Disk& disk, const std::string& place, std::span<std::byte> memory) {
  SavedFolder folder(disk, place);
  for (const auto& [name, tensor] : folder.index().tensors) {
    const auto size = static_cast<size_t>(tensor.sizes[0]);
    folder.read(name, Box::whole(tensor.sizes), memory.first(size));
    memory = memory.subspan(size);
  }
}

} // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: checkpoint_files FOLDER [MIB [ROUNDS]]\n";
    return 2;
  }
  auto& disk = Disk::real();
  const std::string folder = arguments[1];
  std::vector<std::byte> bytes((count > 2 ? std::stoul(arguments[2]) : 1024) * kMib);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 2654435761U >> 24U);
  const auto tensors = tensors_of(bytes);
  std::vector<std::byte> memory(bytes.size());
  std::map<std::string, double> fastest;
  const auto timed = [&](const std::string& name, const auto& what) {
    const auto begin = std::chrono::steady_clock::now();
    what();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    fastest[name] = std::max(fastest[name], 1e-9 * static_cast<double>(bytes.size()) / taken.count());
  };
  for (int round = 0; round < (count > 3 ? std::stoi(arguments[3]) : 3); ++round) {
    const auto plain = folder + "/plain";
    timed("plain write", [&] { write_plain(disk, plain, bytes); });
    timed("plain read", [&] { read_plain(disk, plain, memory); });
    disk.remove_file(plain);
    const auto place = folder + "/checkpoint";
    timed("checkpoint write", [&] {
      const auto saving = begin_saving(disk, place);
      Marker marker;
      marker.files = write_shard(disk, saving.folder, 1, tensors);
      commit_saving(disk, saving, std::move(marker));
    });
    timed("checkpoint read", [&] { load(disk, place, memory); });
    for (const auto& name : disk.list(place)) disk.remove_file(place + "/" + name);
    disk.remove_folder(place);
  }
  for (const auto& [name, speed] : fastest)
    std::cout << "{\"name\": \"" << name << "\", \"gigabytes_per_second\": " << speed << "}\n";
}
