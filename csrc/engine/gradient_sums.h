#pragma once

#include "group/gradients.h"

#include <cstdint>
#include <optional>

namespace shardwise::engine {

class Unit;

/// Takes the gradients of a unit to .grad, step by step as its schedule says: begin(), the second sum over the ranks
/// that hold copies, wait(), publish().
class GradientSums {
 public:
  explicit GradientSums(Unit& unit) : unit_(unit) {}

  /// Whether the sums of this unit share a process group with gathers.
  bool share_group() const;
  /// A backward begins: the program's settings at this point apply until its end, so that ranks cannot differ. Takes
  /// gradients that the program itself put on the leaves, as if a backward without synchronisation had left them, in
  /// the dtype of sums.
  void prepare();
  /// Whether backwards without synchronisation left gradients on this rank.
  bool has_pending() const;
  /// Whether a backward without synchronisation ended since the last sum. The same on all ranks, even on those where it
  /// left no gradient.
  bool are_owed() const;

  /// Raises Error if a gradient came that no sum took.
  void need_nothing_left() const;

  /// A forward begins, which may use the memory of the last sums.
  void rest();
  /// Whether a large gradient waits for its bucket, now that this parameter's has come.
  bool has_large(const group::Parameter& arrived);
  /// Moves large gradients that wait for their sum into its bucket, where that costs no memory. `is_next`: no other sum
  /// starts before.
  void take_large(bool is_next);
  /// The sums of the backward are done; the sums of backwards inside it follow.
  void turn_to_inside();
  /// Starts the sum over the ranks that hold shards. The sum over those that hold copies follows when it is done; in a
  /// stream it follows at once, and nothing waits for either before publish().
  void begin();
  /// Starts the second sum if the first one is done. Returns whether wait() would return at once.
  bool advance();
  /// Waits for the first sum and starts the second one, which needs nothing more from this rank to finish.
  void finish_first();
  void wait();
  void publish();
  /// Runs the user's post-accumulate hooks on what was published since they last ran.
  void run_hooks();
  void forget_hooks();
  void forget();
  /// Drops what backwards without synchronisation, or without an all-reduce, left for the next sum.
  void forget_accumulated();

 private:
  template <typename Do>
  void for_each(const Do& act);
  group::Gradients::Rule rule() const;
  group::Gradients::Streams* streams() const;
  comm::HostCopies& to_host() const;
  void begin_second();
  void begin_copies();
  at::Tensor as_published(const group::Parameter& parameter, const at::Tensor& mean) const;
  void publish_alone();

  Unit& unit_;
  /// What this backward sums, as the flags said when it began; and the same once begin() was called, else unset.
  enum class Extent : uint8_t { nothing, shards, all };
  Extent planned_ = Extent::all;
  std::optional<Extent> extent_;
  bool large_waits_ = false;
  /// The first sum was started, and finish_first() has not run yet.
  bool scattering_ = false;
  /// Streams, not the host, wait for the sums that were started.
  bool in_stream_ = false;
};

} // namespace shardwise::engine
