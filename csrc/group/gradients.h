#pragma once

#include "comm/buffers.h"
#include "comm/collectives.h"
#include "group/copy_batch.h"
#include "group/parameter.h"
#include "group/sum.h"
#include "layout/shards.h"

#include <shardwise/counters.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// The trained parameters of a group whose gradients travel in one collective.
///
/// The bucket has a part for each rank that keeps one of its own, or a single part that all ranks keep. A part holds
/// gradients, divided as far as is done before the sum, then one count per parameter: 1 where this rank used it. After
/// the sum, a parameter with count 0 was used nowhere and gets no gradient.
class Gradients {
 public:
  /// The parameters stay their unit's. All are on the device of the first. `layout` has a cut for each: of a world of
  /// one where every rank keeps the mean of everything. Sums are in `dtype`.
  Gradients(std::vector<Parameter*> parameters, layout::Shards layout, at::ScalarType dtype);

  const std::vector<Parameter*>& parameters() const {
    return parameters_;
  }

  /// What sums are divided by in all.
  struct Divisor {
    double value = 1;
    /// After the sum instead of before it.
    bool after = false;
  };
  /// Copies what waits into the bucket, and starts the sum over `shards`: each of them gets its part, or all get
  /// everything. There is none to start where this rank is alone.
  void begin(
      const comm::Collectives& shards, Divisor divisor, comm::Buffers& buffers, const std::string& unit,
      Counters& counters);
  /// Whether wait() would return at once.
  bool done() const {
    return !pending_ || pending_->done();
  }
  /// Waits for what was started, and gives the bucket back.
  void wait(comm::Buffers& buffers);
  /// After wait(): adds what keep_partial() put aside, and starts the sum over the ranks that have the same, if there
  /// are others.
  void begin_all_reduce(const comm::Collectives& copies, const std::string& unit, Counters& counters);
  /// After wait(): publishes the means, as views of the sum, which `hook` may look at and change before.
  void publish(const std::function<void(at::Tensor& sum)>& hook = {});
  /// After wait(): puts the sum aside, which is not yet that of all ranks, until a later one is.
  void keep_partial();
  /// Ends what is under way, and gives no gradient to anyone.
  void drop(comm::Buffers& buffers);
  bool under_way() const {
    return under_way_;
  }
  /// Bytes of the bucket, and of what this rank keeps of it.
  int64_t bucket_bytes() const;
  int64_t sum_bytes() const {
    return bucket_bytes() / layout_.world;
  }

 private:
  bool scattered() const {
    return layout_.world > 1;
  }
  int64_t segment() const {
    return layout_.part + static_cast<int64_t>(parameters_.size());
  }
  at::Tensor piece_in(const at::Tensor& buffer, size_t index, int64_t rank, int64_t start) const;
  void provide(comm::Buffers& buffers, Counters& counters);
  void fill(size_t index, const at::Tensor& gradient, double scale);
  bool move(size_t index, const at::Tensor& gradient, double scale);
  void fill_counts();
  at::Tensor count_of(size_t index) const;
  const at::Tensor& mean_of(size_t index);
  std::vector<size_t> used_somewhere() const;
  comm::CollectiveName named(const char* sum, const std::string& unit) const;

  std::vector<Parameter*> parameters_;
  layout::Shards layout_;
  std::vector<std::vector<int64_t>> strides_;
  /// Of the bucket, by parameter: one for each rank's part.
  std::vector<std::vector<Piece>> pieces_;
  CopyBatch moves_;
  at::TensorOptions options_;
  int64_t rank_ = 0;
  /// What the sum is still to be multiplied by.
  double after_ = 1;
  at::Tensor bucket_;
  /// What comes out: the bucket itself where nothing is scattered.
  Sum sum_;
  Sum spare_;
  /// What is published is of another kind than sums.
  bool converts_ = false;
  std::vector<bool> used_here_;
  std::optional<comm::Pending> pending_;
  bool under_way_ = false;
};

} // namespace shardwise::group
