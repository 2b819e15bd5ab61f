#pragma once

#include "group/copies.h"
#include "group/extension.h"
#include "group/leaf_storage.h"
#include "layout/shards.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// The full copies of parameters that have an extension each. What the extensions send travels as bytes, in one
/// collective.
class ExtendedCopies : public Copies {
 public:
  /// The parameters' shards stay as they are. Full copies are on `device`.
  ExtendedCopies(std::vector<Parameter*> parameters, int64_t world, at::Device device);

  bool fits() const override;
  void prepare() override;
  /// Bytes that this rank sends; 0 before the first gather.
  int64_t sent_bytes() const {
    return part_;
  }

 private:
  /// One input, joined from what all ranks sent of it.
  struct Output {
    size_t parameter;
    /// The sizes of this rank's input.
    std::vector<int64_t> input_sizes;
    at::ScalarType dtype;
    /// Where the input starts in the bytes that a rank sends.
    int64_t start;
    int64_t bytes;
    LeafStorage storage;
  };

  void provide(
      bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers,
      Counters& counters) override;
  void start(const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters)
      override;
  void copy_out(int64_t holders, comm::Buffers& buffers, Counters& counters) override;
  void free_leaves() override;
  bool gathers_apart() const override {
    return world_ > 1;
  }
  void lay_out();
  void check() const;
  void copy_outputs(comm::Buffers& buffers, Counters& counters);
  void make_full();

  int64_t world_;
  at::Device device_;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds_;
  std::vector<Output> outputs_;
  int64_t part_ = 0;
  /// By parameter; until they are sent.
  std::vector<std::vector<at::Tensor>> inputs_;
};

} // namespace shardwise::group
