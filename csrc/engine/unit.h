#pragma once

#include "engine/gradient_sums.h"
#include "engine/schedule.h"
#include "engine/unit_ranks.h"
#include "group/front_end_callbacks.h"
#include "group/group.h"
#include "group/parameter.h"

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>
#include <shardwise/options.h>
#include <shardwise/unit.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::observe {
class Span;
}

namespace shardwise::engine {

class Unit;

/// The unit that has this shard; null when none has. Thread safe, since ranks may be threads.
std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard);

/// The text of the error that names what has no values yet, the remedy, and the rank if known.
std::string still_on_meta(std::optional<int64_t> rank, const std::vector<std::string>& names);

/// Zeros of the same sizes and strides on a device.
at::Tensor with_memory(const at::Tensor& tensor, at::Device device);

/// A tensor of a module, and all its names there.
struct NamedTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  /// The dimension to cut it along.
  int64_t shard_dim = 0;
  /// Every rank keeps all of it, even in a sharded unit.
  bool whole = false;
  /// The dtype that its module computes with, where it is not that of the unit's MixedPrecision.
  std::optional<at::ScalarType> full_dtype = std::nullopt;
  /// The dtype of its gradient, if the program set another one than its own (torch's grad_dtype).
  std::optional<at::ScalarType> grad_dtype = std::nullopt;
  /// For a tensor that wraps another one, the one with the memory; undefined if it has its own memory.
  at::Tensor full = {};
  /// The values, if they are elsewhere because that memory is of another dtype; else undefined. With an extension, this
  /// rank's shard.
  at::Tensor values = {};
  /// Null if its shard is an ordinary piece.
  std::shared_ptr<group::Extension> extension = nullptr;
  /// What this rank found, and all ranks act on. `unheld`: only registries hold the parameter, so it stays whole.
  /// `shared`: its memory is shared with something that will not follow it, which is an Error.
  bool unheld = false;
  bool shared = false;
};

/// How a unit is made.
struct UnitSettings {
  /// Every rank holds everything. `layout` is then that of separate full copies, or `replicate` if there are none.
  bool replicates = true;
  group::Layout layout = group::Layout::replicate;
  MixedPrecision precision = {};
  std::optional<CpuOffload> offload = std::nullopt;
  /// Every rank first gets the values of rank 0.
  bool broadcast = false;
  /// Unset: a unit frees its full copies after its forward, except the outermost one.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// The unit has those parameters of a call that are on another mesh than the rest. The call then makes the unit of
  /// the rest, around it.
  bool is_companion = false;
  /// The user's own collectives get the mesh's process group, which the user knows, instead of one of the units' own.
  bool custom_on_mesh = false;
  /// Needed where full copies come and go. Lives as long as the unit.
  std::shared_ptr<group::FrontEndCallbacks> front_end = nullptr;
  /// A process group of the ranks that together hold everything after forward, if the front end has one: for a mesh
  /// whose groups have no store over which to make it.
  c10::intrusive_ptr<c10d::ProcessGroup> neighbours = nullptr;

  /// The dtype of the full copy of a parameter of `dtype`. `own`: its own dtype to compute in, if it has one.
  SHARDWISE_API at::ScalarType full_dtype(at::ScalarType dtype, std::optional<at::ScalarType> own) const;
  /// Whether modules compute with the same tensors that the optimizer sees, if these have `dtype` and full copies would
  /// have `full`: they are neither cut, nor cast, nor moved to the device.
  SHARDWISE_API bool shares(at::ScalarType dtype, at::ScalarType full, at::Device device) const;
};

/// One call of replicate() or fully_shard(): the parameters below a module that no inner unit has. Units form a tree,
/// and the schedule of the tree says when things happen.
///
/// The hooks on its leaves keep a unit alive, and a unit keeps the one around it; nothing here keeps a leaf alive.
class SHARDWISE_API Unit : public std::enable_shared_from_this<Unit>, private group::Parameter::Listener {
 public:
  /// Each tensor is listed once. Compares names, shapes and dtypes with the other ranks. If `settings` say so,
  /// broadcasts this unit's own parameters, and the buffers.
  static std::shared_ptr<Unit> create(
      const Mesh& mesh, std::vector<NamedTensor> parameters, const std::vector<NamedTensor>& buffers,
      const UnitSettings& settings);
  ~Unit() override;

  /// The unit that has this leaf or shard; null when none has.
  static std::shared_ptr<Unit> of(const at::Tensor& parameter);

  const std::string& name() const {
    return name_;
  }
  /// "replicate" or "fully_shard".
  const char* kind() const;
  bool replicates() const {
    return settings_.replicates;
  }
  /// Whether its modules compute with full copies, gathered or cast, instead of the tensors that the optimizer sees.
  bool has_full_copies() const {
    return settings_.layout != group::Layout::replicate;
  }
  /// Whether its modules see tensors that come and go, or different tensors at different times.
  bool visible_tensors_change() const {
    return settings_.front_end != nullptr;
  }
  const MixedPrecision& precision() const {
    return settings_.precision;
  }
  /// Whether shards in the host's memory are in pinned memory.
  bool pins() const {
    return settings_.offload && settings_.offload->pin_memory() && !mesh_.device().is_cpu();
  }
  /// Units that were made earlier have lower numbers.
  int64_t number() const {
    return number_;
  }
  const std::vector<std::unique_ptr<group::Parameter>>& parameters() const {
    return parameters_;
  }
  const std::vector<std::unique_ptr<group::Group>>& groups() const {
    return groups_;
  }
  const Mesh& mesh() const {
    return mesh_;
  }
  UnitRanks& ranks() {
    return ranks_;
  }
  const UnitRanks& ranks() const {
    return ranks_;
  }
  const comm::Collectives& shards() const {
    return ranks_.shards();
  }
  /// Its number among the units of its agreement, the same on all ranks.
  int64_t number_for_all() const {
    return number_for_all_;
  }
  at::Device device() const {
    return mesh_.device();
  }
  /// The counters of this unit alone.
  Counters& own_counters() {
    return counters_;
  }
  comm::Buffers& buffers() const {
    return schedule_->buffers();
  }

  // The tree.
  const std::shared_ptr<Unit>& outer() const {
    return outer_;
  }
  bool lies_below(const Unit& other) const;
  /// This unit and all below it, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> tree() const;
  /// This unit and its companions: all that one call made.
  std::vector<std::shared_ptr<Unit>> call();
  /// Whether this unit or one below it has the parameter.
  bool has(const at::Tensor& parameter) const;
  const std::shared_ptr<Schedule>& schedule() const {
    return schedule_;
  }
  UnitTiming& timing() const {
    return schedule_->order().timing(id_);
  }

  // What its schedule, which has the order of the tree, calls:
  /// From now on this schedule's, by this id in its order.
  void belong_to(std::shared_ptr<Schedule> schedule, UnitId id) {
    schedule_ = std::move(schedule);
    id_ = id;
  }
  UnitId id() const {
    return id_;
  }
  GradientSums& sums() {
    return sums_;
  }
  /// While modules show what the optimizer sees, that is what the program freezes.
  void follow_visible();
  /// While a record is on: of a forward or a backward.
  void begin_span();
  void end_forward_span();

  // What front ends announce.
  /// A tensor is about to be used: Schedule::enter(), but cheap if this unit was entered last and nothing changed
  /// since. `moment` is Schedule::now().
  void use(const at::Tensor& tensor, Keep keep, Order::Moment moment);
  /// A shard is about to be written.
  void shard_written();
  /// The full leaf of a sharded parameter has the memory of `whole` until restore_memory().
  void lend_leaf(const group::Parameter& parameter, const at::Tensor& whole);
  /// Gives leaves that got other memory their own back. Returns the name of the first; "" if there was none.
  std::string restore_memory() const;
  /// The parameter whose full copy is in this tensor's memory; null if there is none.
  const group::Parameter* parameter_at(const at::Tensor& tensor) const;
  /// Whether this tensor stands for its own parameter number `index`.
  bool sees(size_t index, const at::Tensor& tensor) const {
    return index < seen_.size() && seen_[index] == tensor.unsafeGetTensorImpl();
  }
  /// The same for all of them: none was replaced by another tensor, as a cast of a single module does.
  bool sees_all() const;
  /// What the optimizer sees of its own parameters, as the unit around it takes them.
  std::vector<NamedTensor> named_parameters() const;
  /// This rank's parts of its own parameters.
  std::vector<at::Tensor> stored() const;
  /// From now on `shard` holds this rank's part of its own parameter number `index`, and the optimizer sees `visible`.
  void replace_shard(size_t index, const at::Tensor& shard, std::shared_ptr<group::VisibleParameter> visible);
  /// From now on its own parameter number `index` has this extension.
  void set_extension(size_t index, std::shared_ptr<group::Extension> extension);
  /// The parameter of this shard; null if it is not a shard of this unit.
  const group::Parameter* parameter_of_shard(const at::Tensor& tensor) const;

  // Full copies.
  /// Returns whether a gather is now under way.
  bool begin_unshard();
  void finish_unshard();
  /// `hold`: keeps this rank's larger part for the backward, if there is one (see ReshardAfterForward).
  void reshard(bool hold = false);
  /// Whether its modules show full copies now.
  bool shows_full() const {
    return shows_full_;
  }
  /// Whether a backward that reaches the unit gathers it. Stays off without a front end, which announces uses.
  void set_unshard_in_backward(bool value) {
    timing().unshard_in_backward = value && settings_.front_end;
  }

  /// Remakes the groups if parameters were cast, moved or loaded since, and their buckets if some were frozen. Raises
  /// Error if some have no values yet.
  void renew_groups();

  /// Sets the check that raises Error if the modules changed in a way that only the front end sees.
  void set_modules_check(std::function<void()> check) {
    modules_check_ = std::move(check);
  }
  /// Runs that check for an outermost unit, whose modules are about to be trained.
  void check_modules() const {
    if (!outer_ && modules_check_) modules_check_();
  }
  /// Raises an Error that names all parameters of the tree that are on the meta device.
  void need_values() const;
  /// Gives memory to those of these tensors, its own parameters, that are on the meta device.
  void provide_memory(const std::vector<at::Tensor>& parameters);
  /// Parameters were cast or moved, and nothing refers to their memory yet: moves them into the unit's memory. Without
  /// this call, training continues in the memory that they have at the next use, at the cost of a copy for each gather.
  void take_memory();

  /// What the public handle sets. shardwise/unit.h says when each is read.
  struct Options {
    bool sync = true;
    bool all_reduce = true;
    std::optional<double> divide_factor;
    bool divide_after = false;
    bool counts_unused = false;
    bool keeps_storage = false;
    std::function<void(at::Tensor&)> all_reduce_hook;
    UnitRanks::CustomCollectives custom_collectives;
    std::vector<std::weak_ptr<Unit>> forward_prefetch;
    std::vector<std::weak_ptr<Unit>> backward_prefetch;
  };
  Options options;

  Plan plan() const;
  Counters counters() const;

 private:
  Unit(const Mesh& mesh, const UnitSettings& settings);
  void gradient_arriving(group::Parameter& parameter, bool defined) override;
  bool is_inside_another() const override;
  void gradient_arrived(group::Parameter& parameter) override;
  void gradient_published(const at::Tensor& gradient) override;

  /// From now on unit_of_shard() finds this unit for it. The unit holds on to its shards, so an address means the same
  /// tensor as long as its entry exists.
  void add_shard(const at::Tensor& shard);
  static void remove_shard(const at::TensorImpl* shard);
  void find_neighbours();
  void adopt(const std::vector<NamedTensor>& adopted);
  void check_structure(std::vector<NamedTensor>& own, const std::vector<NamedTensor>& buffers, size_t adopted);
  [[noreturn]] void refuse_shared(const NamedTensor& parameter, size_t rank) const;
  void broadcast(const std::vector<NamedTensor>& tensors);
  template <typename Do>
  void for_full_copies(const Do& act);
  std::string describe_gather(bool near, bool backward) const;
  void make_shard(group::Parameter& parameter, const at::Tensor& values);
  void show(bool full);
  void begin(std::unique_ptr<observe::Span>& span, const char* kind) const;
  void follow_parameters(bool takes_memory);
  void need_no_copies() const;
  void need_own_memory() const;
  Plan::Unit own_plan() const;
  std::string when_resharded() const;
  group::Group::Setting setting(bool takes_memory) const;

  int64_t number_;
  std::string name_;
  Mesh mesh_;
  UnitSettings settings_;
  UnitRanks ranks_;
  int64_t number_for_all_ = 0;
  GradientSums sums_{*this};
  bool shows_full_ = false;
  /// The tensors that stand for its parameters; null if there is none.
  std::vector<const at::TensorImpl*> seen_;
  std::vector<std::unique_ptr<group::Parameter>> parameters_;
  std::vector<std::unique_ptr<group::Group>> groups_;
  std::shared_ptr<Unit> outer_;
  std::shared_ptr<Schedule> schedule_;
  UnitId id_ = 0;
  Counters counters_;
  std::function<void()> modules_check_;
  /// While a record is on: from the first use to the end of the module, or to the last gradient.
  std::unique_ptr<observe::Span> forward_span_;
  std::unique_ptr<observe::Span> backward_span_;
};

} // namespace shardwise::engine
