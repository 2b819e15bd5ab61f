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
    Layout layout = Layout::replicate;
    /// The number of shards, and which of them is this rank's.
    int64_t rank = 0;
    int64_t world = 1;
    /// Of full copies and of sums, where those are floating-point numbers; unset: of the parameters, of the full
    /// copies.
    std::optional<at::ScalarType> full_dtype;
    std::optional<at::ScalarType> sum_dtype;
    /// Where full copies live, with the shards in the host's memory, pinned or not. Unset: where the parameters do.
    std::optional<at::Device> full_device;
    bool pin = false;
    FrontEndCallbacks* front_end = nullptr;
    /// See FullCopies.
    bool takes_memory = true;
    /// The groups of these parameters so far, which are freed; null where there are none.
    const std::vector<std::unique_ptr<Group>>* before = nullptr;
  };

  /// The parameters stay their unit's. All have the dtype and device of the first.
  Group(std::vector<Parameter*> parameters, const Setting& setting);

  /// One group for each dtype, device and form, in the order of the first parameter of each.
  static std::vector<std::unique_ptr<Group>> make(
      const std::vector<std::unique_ptr<Parameter>>& parameters, const Setting& setting);
  /// Whether dtype, device, sizes and memory are still those that the group was made for.
  bool fits() const;
  /// Makes the bucket anew when parameters were frozen or unfrozen, and passes that on to the leaves. A frozen one
  /// leaves it once it owes nothing. `settle` is called before the old one goes: a sum in it may be under way.
  void follow_requires_grad(const std::function<void()>& settle = {});

  /// Null where every rank holds everything.
  Copies* copies() {
    return extended_copies_ ? static_cast<Copies*>(&*extended_copies_) : full_copies();
  }
  /// The same of parameters whose shards are pieces of one vector.
  FullCopies* full_copies() {
    return full_copies_ ? &*full_copies_ : nullptr;
  }
  /// Null when all parameters are frozen.
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

  /// What its unit does with it in a step, for plan().
  struct Step {
    /// Every rank keeps everything.
    bool replicates = true;
    /// How many hold the other shards, and copies of this rank's.
    int64_t shards = 1;
    int64_t copies = 1;
    /// Full copies are brought in backward too, from so many ranks.
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
  Outline outline_;
  std::optional<FullCopies> full_copies_;
  std::optional<ExtendedCopies> extended_copies_;
  std::optional<Gradients> gradients_;
};

} // namespace shardwise::group
