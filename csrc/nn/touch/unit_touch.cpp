#include "nn/touch/unit_touch.h"

#include "group/leaf_storage.h"
#include "nn/hooks/unit_hooks.h"
#include "nn/touch/local_values.h"
#include "nn/touch/pieces.h"
#include "nn/touch/shard_errors.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

namespace shardwise::nn {

namespace {

/// Whether a write of it would make shards that do not belong together.
bool is_mixed(Local local) {
  return local == Local::mixed || local == Local::sum;
}

} // namespace

/// Knows the unit, which may be gone.
struct UnitTouch::UnitListener : TouchListener {
  std::weak_ptr<engine::Unit> unit;
};

class UnitTouch::Full : public UnitListener {
 public:
  bool touched(const Touch& touch) override {
    const auto owner = unit.lock();
    if (!owner) return false;
    if (touch.written) refuse_write_to_full(*owner, touch);
    if (!unverified->empty()) unverified->erase(owner->parameter_at(touch.tensor));
    const auto moment = engine::Schedule::now();
    const bool takes_turn = moment.backward < 0;
    if (takes_turn) owner->schedule()->turn().take(owner->name());
    try {
      owner->use(touch.tensor, touch.again ? engine::Keep::all : engine::Keep::outer, moment);
    } catch (...) {
      if (takes_turn) owner->schedule()->turn().give();
      throw;
    }
    return takes_turn;
  }
  bool needs_arguments() const override {
    return wanted_dtype().has_value();
  }
  std::string advice(const c10::OperatorHandle& operation) const override {
    const auto owner = unit.lock();
    return owner ? why_dtypes_differ(*owner, operation) : "";
  }
  // The memory stays until the operation is over.
  void ended() noexcept override {
    if (const auto owner = unit.lock()) owner->schedule()->turn().give();
  }

  // Nothing is cast in a backward: its operations get what those of the forward got, and results of that.
  std::optional<at::ScalarType> wanted_dtype() const override {
    if (!dtype || calls > 0 || (engine::BackwardWatch::running() && !c10::GradMode::is_enabled())) return std::nullopt;
    return dtype;
  }
  bool is_exempt_from_cast(const at::Tensor& argument) const override {
    return buffers.contains(argument.unsafeGetTensorImpl());
  }

  std::optional<at::ScalarType> dtype;
  std::unordered_set<const at::TensorImpl*> buffers;
  /// How many calls between begin_call() and end_call() are running.
  int calls = 0;
  /// Parameters of which it was assumed that a member holds them, and whose leaves were not used yet.
  std::shared_ptr<UnverifiedParameters> unverified = std::make_shared<UnverifiedParameters>();
};

/// For shards and their gradients.
class UnitTouch::Piece : public UnitListener {
 public:
  std::string explain(const Touch& touch) const override {
    const auto owner = unit.lock();
    const auto* parameter = owner ? pieces.find(*owner, touch.tensor) : nullptr;
    auto reason = parameter != nullptr ? why_sizes_differ(*owner, *parameter, touch) : "";
    if (!reason.empty() || touch.tensor.numel() > 0) return reason;
    return explain_local_result(touch.operation.operator_name().name);
  }
  Origin origin(const at::Tensor& tensor) const override {
    const auto owner = is_whole ? nullptr : unit.lock();
    if (!owner) return {};
    const auto* parameter = pieces.find(*owner, tensor);
    if (parameter == nullptr) return {Local::piece, std::nullopt};
    const auto cut = cut_of(*parameter, tensor);
    return {cut.has_all_rows(tensor) ? Local::piece : Local::mixed, cut.dimension_in(tensor)};
  }
  bool may_detach() const override {
    return true;
  }
  /// There is one shard.
  bool is_whole = false;

 protected:
  Pieces pieces;
};

class UnitTouch::Shard : public Piece {
 public:
  bool touched(const Touch& touch) override {
    const auto owner = unit.lock();
    if (!owner) return false;
    const auto* parameter = is_whole ? nullptr : pieces.find(*owner, touch.tensor);
    if (parameter != nullptr) {
      refuse_what_needs_the_whole(*owner, *parameter, touch);
      if (!touch.written) warn_of_concatenated_shards(*owner, *parameter, touch);
      if (touch.written && is_mixed(touch.local)) refuse_local_values(*owner, *parameter, touch);
    }
    if (touch.written) owner->shard_written();
    return false;
  }
};

/// For the gradients that were published to shards.
class UnitTouch::Gradient : public Piece {
 public:
  bool touched(const Touch& touch) override {
    const auto owner = touch.written && !is_whole ? unit.lock() : nullptr;
    const auto* parameter = owner ? pieces.find(*owner, touch.tensor) : nullptr;
    if (parameter == nullptr) return false;
    refuse_write_by_place(*owner, *parameter, touch);
    if (is_mixed(touch.local)) refuse_local_values(*owner, *parameter, touch);
    return false;
  }
};

/// For what full leaves have in place of a gradient.
class UnitTouch::Absent : public UnitListener {
 public:
  bool touched(const Touch& touch) override {
    if (const auto owner = unit.lock()) refuse_absent_gradient(*owner, touch);
    return false;
  }
};

UnitTouch::UnitTouch()
    : full_(std::make_shared<Full>()),
      shard_(std::make_shared<Shard>()),
      gradient_(std::make_shared<Gradient>()),
      absent_(std::make_shared<Absent>()) {}

UnitTouch::~UnitTouch() = default;

void UnitTouch::bind(
    const std::shared_ptr<engine::Unit>& unit, const std::vector<engine::NamedTensor>& buffers,
    const std::unordered_set<const at::TensorImpl*>& taken_for_members) {
  full_->unit = shard_->unit = gradient_->unit = absent_->unit = unit;
  if (unit->precision().cast_forward_inputs()) full_->dtype = unit->precision().param_dtype();
  for (const auto& buffer : buffers) full_->buffers.insert(buffer.tensor.unsafeGetTensorImpl());
  shard_->is_whole = gradient_->is_whole = unit->shards().size() == 1;
  if (shard_->is_whole) return;
  for (const auto& parameter : unit->parameters()) {
    if (parameter->whole || !taken_for_members.contains(parameter->leaf().unsafeGetTensorImpl())) continue;
    full_->unverified->insert(parameter.get());
    refuse_first_gradient(*parameter, full_->unverified, unit);
  }
}

void UnitTouch::begin_call() {
  ++full_->calls;
}

// There may be an end without a begin: a hook of the user's that failed first kept ours from seeing the begin.
void UnitTouch::end_call() {
  full_->calls = std::max(0, full_->calls - 1);
}

void UnitTouch::mark(const at::Tensor& tensor) {
  if (test_switches().touch) add_touch_key(tensor);
}

std::shared_ptr<void> UnitTouch::watch(const at::Tensor& tensor, Role role) {
  // A cast of a shard is computed from one before it becomes one.
  LocalValues::forget(tensor);
  if (role == Role::full) return std::make_shared<TouchRegistration>(tensor, full_);
  return std::make_shared<TouchRegistration>(tensor, shard_);
}

std::string UnitTouch::read_error(const std::string& names) const {
  return "shardwise: " + names +
         " was read by data_ptr(), an accessor or the like while its full copy is freed or out of date. shardwise does "
         "not notice such reads, so it gathered nothing. Read it inside a call of its module that fires hooks "
         "(shardwise::call(), a container), after an operation used it in this forward, or after "
         "unit(module).unshard(); "
         "or read its shard, in parameters().";
}

at::Tensor UnitTouch::absent_gradient(const at::Tensor& leaf) {
  auto gradient = base::guarded([&] {
    group::LeafStorage storage(leaf.sizes(), leaf.options().requires_grad(false));
    auto alias = storage.alias();
    storage.free();
    return alias;
  });
  mark(gradient);
  absences_.insert_or_assign(leaf.unsafeGetTensorImpl(), TouchRegistration(gradient, absent_));
  return gradient;
}

void UnitTouch::published(const at::Tensor& gradient) {
  if (!gradient.defined() || !gradient.has_storage()) return;
  mark(gradient);
  const auto* storage = gradient.storage().unsafeGetStorageImpl();
  // An entry keeps its address from being used again, so this is the same storage.
  if (gradients_.contains(storage)) return;
  sweep_(gradients_, [](const auto& entry) { return entry.second.expired(); });
  LocalValues::forget(gradient);
  if (!is_watched(gradient)) gradients_.try_emplace(storage, gradient, gradient_);
}

} // namespace shardwise::nn
