#pragma once

#include <cstdint>
#include <optional>

namespace shardwise::engine {

class Unit;

/// The gradients of a unit on their way to .grad, as its schedule lets them go: begun, the second sum over the ranks
/// with copies, waited for, published.
class GradientSums {
 public:
  explicit GradientSums(Unit& unit) : unit_(unit) {}

  /// The sums of its tree wait for the end of the backward.
  bool are_late() const;
  /// What somebody put into the leaves' gradients himself counts like what a backward without synchronisation left, in
  /// the dtype of sums. Asked before each backward: what it takes is what one microbatch left.
  void take_leaf_gradients();
  /// Whether backwards without synchronisation left gradients here.
  bool has_pending() const;
  /// Whether backwards without synchronisation ended since the last sum. The same on all ranks: on some they may have
  /// left nothing here.
  bool are_owed() const;

  /// Starts the sum over the shards' ranks; that over the copies' ranks comes when it is done.
  void begin();
  /// Starts the second sum if the first one is done. Whether wait() would return at once.
  bool advance();
  /// Waits for the first sum and starts the second: the rest needs no event of this rank.
  void finish_first();
  void wait();
  void publish();
  void forget();

 private:
  template <typename Do>
  void for_each(const Do& act);
  void publish_alone();

  Unit& unit_;
  /// What begin() found the flags to say; unset when the running backward did not come there.
  enum class Extent : uint8_t { nothing, shards, all };
  std::optional<Extent> extent_;
  /// The sum over the shards' ranks was started and not ended.
  bool scattering_ = false;
};

} // namespace shardwise::engine
