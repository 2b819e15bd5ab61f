#pragma once

#include "base/weak_table.h"
#include "engine/front_end.h"
#include "group/front_end_callbacks.h"
#include "nn/touch/touch.h"

#include <memory>
#include <unordered_map>
#include <unordered_set>

namespace shardwise::nn {

/// Tells a unit of every use of its full copies, and of every write to its shards, by the touch trigger. Refuses what
/// would silently train wrongly.
class UnitTouch : public group::FrontEndCallbacks {
 public:
  UnitTouch();
  ~UnitTouch() override;
  /// Sets the unit that gets the calls, and that owns this object. Its buffers are never cast. `taken_for_members` are
  /// parameters of which it was assumed that a member holds them. If the shard of one gets a gradient before its leaf
  /// was ever used, that is an Error.
  void bind(
      const std::shared_ptr<engine::Unit>& unit, const std::vector<engine::NamedTensor>& buffers,
      const std::unordered_set<const at::TensorImpl*>& taken_for_members);
  /// A call of the unit's module begins or ends, if hooks notice it. Within it nothing is cast operation by operation,
  /// because its inputs were cast.
  void begin_call();
  void end_call();

  void mark(const at::Tensor& tensor) override;
  std::shared_ptr<void> watch(const at::Tensor& tensor, Role role) override;
  std::string read_error(const std::string& names) const override;
  at::Tensor absent_gradient(const at::Tensor& leaf) override;
  void published(const at::Tensor& gradient) override;

 private:
  struct UnitListener;
  class Full;
  class Piece;
  class Shard;
  class Gradient;
  class Absent;

  std::shared_ptr<Full> full_;
  std::shared_ptr<Shard> shard_;
  std::shared_ptr<Gradient> gradient_;
  std::shared_ptr<Absent> absent_;
  /// By the memory in which means were published.
  std::unordered_map<const c10::StorageImpl*, TouchRegistration> gradients_;
  base::Sweep sweep_;
  std::unordered_map<const at::TensorImpl*, TouchRegistration> absences_;
};

} // namespace shardwise::nn
