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
  void begin_unshard(
      const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
      Counters& counters) override;
  bool finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters) override;
  void reshard(comm::Buffers& buffers, bool keeps_memory, Counters& counters) override;

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
    /// Where the input lies in the bytes that a rank sends.
    int64_t start;
    int64_t bytes;
    LeafStorage storage;
  };

  void lay_out();
  void check() const;
  void copy_out();
  void make_full();
  void release(comm::Buffers& buffers);
  void drop_gather(comm::Buffers& buffers, Counters& counters);

  int64_t world_;
  at::Device device_;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds_;
  std::vector<Output> outputs_;
  int64_t part_ = 0;
  /// By parameter; until they are sent.
  std::vector<std::vector<at::Tensor>> inputs_;
  at::Tensor sent_;
  at::Tensor gathered_;
  at::Tensor memory_;
  std::optional<comm::Pending> pending_;
};

} // namespace shardwise::group
