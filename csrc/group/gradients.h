#pragma once

#include "comm/collectives/buffers.h"
#include "comm/collectives/collectives.h"
#include "comm/streams/side_stream.h"
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

/// The gradients of a group's trained parameters, which travel in one collective.
///
/// Sharded, the bucket has a part for each rank, which keeps its own; replicated, one part, which all ranks keep. A
/// part holds gradients, divided as far as that is done before the sum, then one count for each parameter: 1 if this
/// rank used it. After the sum, a parameter with count 0 was used nowhere and gets no gradient.
class Gradients {
 public:
  /// Whether a gradient with this many elements moves into the bucket before the others arrive, to free its memory
  /// early. Small ones wait and move together: fewer moves cost less.
  static bool moves_at_once(int64_t numel) {
    return numel > CopyBatch::kSmall;
  }

  /// The unit still owns the parameters. All are on the same device. `layout` has a cut for each, in a world of one if
  /// every rank keeps the mean of everything. Sums are in `dtype`. `pin`: gradients that go to the host are in pinned
  /// memory.
  Gradients(std::vector<Parameter*> parameters, layout::Shards layout, at::ScalarType dtype, bool pin);

  const std::vector<Parameter*>& parameters() const {
    return parameters_;
  }

  struct Rule {
    /// What sums are divided by, before and after the sum together.
    double divisor = 1;
    /// Divide after the sum instead of before it.
    bool divides_after = false;
    /// A parameter that no rank used gets a gradient too: zeros.
    bool counts_unused = false;
    /// The collectives that provide memory for bucket and result; null: ordinary memory.
    const comm::Collectives* memory = nullptr;
  };
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  ~Gradients();

  /// Streams for a device's sums, so that computation does not wait for them: one for sums over shards, one for sums
  /// over copies. Copies to the host follow them.
  struct Streams {
    comm::SideStream shards;
    comm::SideStream copies;
    comm::HostCopies to_host;
  };
  /// Called before gradients go to the host's memory: raises Error if a graph is being captured.
  static void check_offload(const Parameter& parameter, at::Device device);
  /// Between two sums: gives back the memory of results that the program no longer holds.
  void rest();
  /// Copies the large gradients that wait into the bucket, if this sum is the next one or the bucket is the result,
  /// whose memory exists anyway. Returns whether they still wait.
  bool take_large(bool is_next, Rule rule, comm::Buffers& buffers, Counters& counters);
  /// Copies the gradients that still wait into the bucket, and starts the sum over `shards`: each rank gets its part,
  /// or all get everything. Starts nothing if this rank is alone. `streams` is null if the host waits for sums.
  void begin(
      const comm::Collectives& shards, Rule rule, comm::Buffers& buffers, Streams* streams, const std::string& unit,
      Counters& counters);
  /// Whether wait() would return at once.
  bool done() const {
    return !pending_ || pending_->done();
  }
  /// Waits for the sum that was started, and gives the bucket back. In a stream there is no wait.
  void wait(comm::Buffers& buffers);
  /// After wait(), or in a stream after begin(): adds what keep_partial() kept, and starts the sum over the ranks with
  /// copies, if there are others.
  void begin_all_reduce(const comm::Collectives& copies, Streams* streams, const std::string& unit, Counters& counters);
  /// After the last sum was started in a stream: starts to copy what the host will need, unless the host would wait for
  /// that. This is the counts if this rank left a parameter unused, or with `is_final` the gradients, if their shards
  /// are in the host's memory.
  void begin_copies(bool is_final, comm::HostCopies& to_host);
  /// After wait(): publishes the means, as views of the sum or of its copy on the host. `hook` may look at the sum and
  /// change it first.
  void publish(comm::HostCopies& to_host, const std::function<void(at::Tensor& sum)>& hook = {});
  /// After wait(): keeps the sum, which is not yet over all ranks, for a later begin_all_reduce().
  void keep_partial();
  /// Ends what is under way, and publishes nothing.
  void drop(comm::Buffers& buffers);
  bool under_way() const {
    return under_way_;
  }
  /// Bytes of the whole bucket, and of the part that this rank keeps.
  int64_t bucket_bytes() const;
  int64_t sum_bytes() const {
    return bucket_bytes() / layout_.world;
  }

 private:
  bool scattered() const {
    return layout_.world > 1;
  }
  at::Tensor piece_in(const at::Tensor& buffer, size_t index, int64_t rank, int64_t start) const;
  at::Device device() const {
    return options_.device();
  }
  void open(Rule rule, comm::Buffers& buffers, Counters& counters);
  void provide_result(const comm::Collectives* memory, Counters& counters);
  void at_once(c10::function_ref<void()> act) const;
  void take(size_t index, Counters& counters);
  void wait_in_stream();
  void give_bucket(comm::Buffers& buffers);
  void await_result();
  void fill(size_t index, const at::Tensor& gradient, double scale);
  bool move(size_t index, const at::Tensor& gradient, double scale);
  void fill_counts();
  void clear_gaps(const at::Tensor& sum) const;
  at::Tensor count_of(size_t index) const;
  const at::Tensor& mean_of(size_t index);
  /// The options of published gradients.
  at::TensorOptions published_kind() const;
  bool has_unused() const;
  at::Tensor counts_in(const at::Tensor& sum) const;
  void copy_to_host(comm::HostCopies& to_host);
  void copy_counts(bool pinned, comm::HostCopies& to_host);
  std::vector<size_t> used_somewhere() const;
  comm::CollectiveName named(const char* sum, const std::string& unit) const;

  std::vector<Parameter*> parameters_;
  layout::Shards layout_;
  std::vector<c10::DimVector> strides_;
  /// By parameter: what each rank gets of it, and the places in the bucket.
  std::vector<std::vector<Piece>> pieces_;
  CopyBatch moves_;
  at::TensorOptions options_;
  /// The elements of a part in the bucket, with the counts: NCCL moves 16 bytes at a time where parts are aligned.
  int64_t segment_ = 0;
  int64_t rank_ = 0;
  /// The bucket is there and takes gradients.
  bool is_open_ = false;
  bool counts_unused_ = false;
  /// What gradients are divided by on their way into the bucket, and what the sum is still to be multiplied by.
  double before_ = 1;
  double after_ = 1;
  at::Tensor bucket_;
  /// The result: the bucket itself if nothing is scattered.
  Sum sum_;
  Sum spare_;
  /// The process group whose memory they use; null: none.
  const void* owner_ = nullptr;
  /// If shards are in the host's memory: the result there.
  bool goes_to_host_ = false;
  bool pin_;
  Sum host_;
  Sum host_spare_;
  /// The counts on the host, where this rank left a parameter unused.
  at::Tensor host_counts_;
  /// They, or the result, are on their way.
  bool copying_ = false;
  /// Gradients are published in another dtype, or on another device, than the result's.
  bool converts_ = false;
  /// By parameter: whether its gradient is in the bucket, and whether it counts as used by this rank.
  std::vector<bool> taken_;
  std::vector<bool> used_here_;
  /// Where the bucket was written last.
  comm::LastUse filled_;
  std::optional<comm::Pending> pending_;
  bool under_way_ = false;
  /// For a sum in a stream: where the bucket was used last, until it is given back, and where the result was written.
  std::optional<comm::LastUse> bucket_use_;
  comm::LastUse result_;
};

} // namespace shardwise::group
