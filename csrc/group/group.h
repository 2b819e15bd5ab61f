#pragma once

#include "group/extended_copies.h"
#include "group/full_copies.h"
#include "group/gradients.h"
#include "group/outline.h"
#include "group/parameter.h"

#include <shardwise/counters.h>
#include <shardwise/plan.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// Parameters of a unit that travel together: same dtype, same device, all sharded or all whole.
class Group {
 public:
  /// What all groups of a unit have in common.
  struct Setting {
    Outline::Policy policy;
    /// Which shard is this rank's.
    int64_t rank = 0;
    /// Where full copies live if the shards are in the host's memory (pinned, if `pin`). Unset: where the parameters
    /// are.
    std::optional<at::Device> full_device;
    bool pin = false;
    FrontEndCallbacks* front_end = nullptr;
    /// See FullCopies::Setting.
    bool takes_memory = true;
    /// The previous groups of these parameters, which are freed; null if there are none.
    const std::vector<std::unique_ptr<Group>>* before = nullptr;
  };

  /// The unit still owns the parameters. All have the same dtype and device.
  Group(std::vector<Parameter*> parameters, const Setting& setting);

  /// One group for each kind (see outline.h), in the order of the first parameter of each.
  static std::vector<std::unique_ptr<Group>> make(
      const std::vector<std::unique_ptr<Parameter>>& parameters, const Setting& setting);
  /// Whether dtype, device, sizes and memory are still those that the group was made for.
  bool fits() const;
  /// Remakes the bucket if parameters were frozen or unfrozen, and passes that on to the leaves. A frozen parameter
  /// leaves the bucket once it owes nothing. `finish_sums` is called before the old bucket is dropped: a sum in it may
  /// be under way.
  void follow_requires_grad(const std::function<void()>& finish_sums = {});

  /// Null where every rank holds everything.
  Copies* copies() {
    return extended_copies_ ? static_cast<Copies*>(&*extended_copies_) : full_copies();
  }
  /// The same if the shards are pieces of one vector; else null.
  FullCopies* full_copies() {
    return full_copies_ ? &*full_copies_ : nullptr;
  }
  /// Null if there is nothing to sum: all parameters are frozen, and owe nothing.
  Gradients* gradients() {
    return gradients_ ? &*gradients_ : nullptr;
  }
  /// Whether its parameters have no values yet.
  bool on_meta() const {
    return options_.device().is_meta();
  }
  const std::vector<Parameter*>& parameters() const {
    return parameters_;
  }

  /// What the unit does with this group in a step, for plan().
  struct Step {
    /// Every rank keeps everything.
    bool replicates = true;
    /// How many ranks hold shards, and how many hold copies of each.
    int64_t shards = 1;
    int64_t copies = 1;
    /// Full copies are gathered in backward too, from this many ranks.
    bool gathers_in_backward = false;
    int64_t backward_ranks = 1;
    /// Whether gradients are summed over shards, and then over copies.
    bool sums = true;
    bool sums_copies = true;
  };
  Plan::Group plan(const Step& step) const;

 private:
  const FullCopies* copies_before(const Setting& setting) const;
  bool follows_requires_grad() const;
  std::vector<Parameter*> summed() const;
  layout::Shards lay_out() const;
  layout::Shards lay_out_some(const std::vector<Parameter*>& parameters) const;

  std::vector<Parameter*> parameters_;
  std::vector<std::vector<int64_t>> sizes_;
  at::TensorOptions options_;
  bool pin_;
  Outline outline_;
  std::optional<FullCopies> full_copies_;
  std::optional<ExtendedCopies> extended_copies_;
  std::optional<Gradients> gradients_;
};

} // namespace shardwise::group
