#pragma once

#include "history.h"

#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <set>
#include <vector>

namespace late {

/// A piece of a device's memory.
struct Block {
  /// Among the device's, in the order in which they were first taken.
  size_t number;
  uintptr_t begin;
  size_t size;
  c10::StreamId owner;
  /// Other streams that record_stream() named since it was taken.
  std::set<c10::StreamId> recorded = {};
  History history;
};

/// The blocks of one device. Its addresses are no memory of the host's: whoever reads there without the device gets a
/// signal. Fresh memory is full of NaN. A block given back is taken again first of all, by the same stream.
class Memory {
 public:
  explicit Memory(int device);

  Block& take(size_t size, c10::StreamId stream);
  void give(Block& block);
  /// The block that holds this address.
  Block& at(uintptr_t address);

  size_t used() const {
    return used_;
  }
  size_t peak() const {
    return peak_;
  }
  void reset_peak() {
    peak_ = used_;
  }

 private:
  const int device_;
  uintptr_t next_;
  std::map<uintptr_t, Block> blocks_;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> free_;
  size_t used_ = 0;
  size_t peak_ = 0;
};

bool is_device_memory(uintptr_t address);
/// The device that an address of device memory belongs to.
int device_of(uintptr_t address);
/// Where the device's own threads find what the program calls `address`.
uintptr_t for_worker_in_device(uintptr_t address);
/// What is there before anything is written: NaN, read as any kind of float.
void poison(uintptr_t begin, size_t size);

} // namespace late
