#pragma once

#include "comm/collectives.h"
#include "group/parameter.h"
#include "layout/flat.h"

#include <shardwise/counters.h>
#include <shardwise/plan.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// Parameters of a unit that travel in one all-reduce: same dtype, same device.
///
/// The bucket holds every gradient divided by the number of ranks, then one count per parameter: 1 where this rank
/// used it. After the sum, a parameter with count 0 was used nowhere and gets no gradient.
class Group {
 public:
  /// The parameters stay their unit's. All have the dtype and device of the first.
  explicit Group(std::vector<Parameter*> parameters);

  /// One group for each dtype and device, in the order of the first parameter of each.
  static std::vector<Group> make(const std::vector<Parameter*>& parameters);
  /// Whether dtype, device and sizes are still those that the group was made for.
  bool fits() const;

  /// Copies what waits into the bucket and starts the sum; each parameter then has nothing waiting.
  void begin_reduce(const comm::Collectives& collectives, const std::string& unit, Counters& counters);
  /// Waits for the sum and publishes the means, as views of the bucket.
  void finish_reduce();

  Plan::Group plan() const;

 private:
  struct Shape {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  at::Tensor gradient_view(size_t index) const;
  at::Tensor counts_view() const;
  void provide_bucket(Counters& counters);

  std::vector<Parameter*> parameters_;
  std::vector<Shape> shapes_;
  at::TensorOptions options_;
  layout::Flat layout_;
  at::Tensor bucket_;
  at::Tensor spare_;
  std::vector<bool> used_here_;
  std::optional<comm::Pending> sum_;
};

} // namespace shardwise::group
