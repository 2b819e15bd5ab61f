#pragma once

#include "engine/gradient_sums.h"
#include "engine/schedule.h"
#include "engine/unit_ranks.h"
#include "group/front_end_callbacks.h"
#include "group/group.h"
#include "group/parameter.h"

#include <shardwise/export.h>
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

/// A tensor of a module and all the names it has there.
struct NamedTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  /// The dimension to cut it along.
  int64_t shard_dim = 0;
  /// Every rank keeps all of it, in a sharded unit too.
  bool whole = false;
  /// The memory of a tensor that is around another one; undefined where it has its own.
  at::Tensor full = {};
  /// Where its values are if that memory is of another dtype; undefined where they are in it. With an extension this
  /// rank's shard.
  at::Tensor values = {};
  /// How it travels; null where its shard is a piece like any other.
  std::shared_ptr<group::Extension> extension = nullptr;
  /// What this rank saw, and all ranks act upon: nothing but registries holds it, which makes it whole; its memory is
  /// shared with something that will not follow it, which is an Error.
  bool unheld = false;
  bool shared = false;
};

/// How a unit is made.
struct UnitSettings {
  /// Every rank holds everything. `layout` is then that of full copies apart from what the optimizer sees, or none.
  bool replicates = true;
  group::Layout layout = group::Layout::replicate;
  MixedPrecision precision = {};
  std::optional<CpuOffload> offload = std::nullopt;
  /// Every rank first gets the values of rank 0.
  bool broadcast = false;
  /// Unset: a unit frees its full copies after its forward, the outermost one keeps them.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// A collective of the user's own gets the mesh's process group, which he knows, and not one of the units' own.
  bool customs_on_mesh = false;
  /// Needed where full copies come and go; lives as long as the unit.
  std::shared_ptr<group::FrontEndCallbacks> front_end = nullptr;
  /// The ranks that hold everything together after forward, where the front end has a process group of them: for a mesh
  /// whose groups have no store, over which it could make one.
  c10::intrusive_ptr<c10d::ProcessGroup> neighbours = nullptr;

  /// Whether modules compute with what the optimizer sees where that is of this dtype: it is neither cut, cast nor
  /// moved to the device.
  SHARDWISE_API bool shares(at::ScalarType dtype, at::Device device) const;
};

/// One call of replicate() or fully_shard(): the parameters below a module that no inner unit has. Units form a tree,
/// and the schedule of their tree says when they do what.
///
/// The hooks of its leaves keep a unit alive, a unit keeps its outer one; nothing here keeps a leaf alive.
class SHARDWISE_API Unit : public std::enable_shared_from_this<Unit>, private group::Parameter::Listener {
 public:
  /// Every tensor once. Compares the names, shapes and dtypes of all ranks; broadcasts the parameters that this unit
  /// has itself, and the buffers.
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
  /// Whether its modules compute with other tensors than the optimizer sees: they are gathered, or cast.
  bool has_full_copies() const {
    return settings_.layout != group::Layout::replicate;
  }
  const MixedPrecision& precision() const {
    return settings_.precision;
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
  /// Its number among the units of the agreement, the same on all ranks.
  int64_t number_for_all() const {
    return number_for_all_;
  }
  at::Device device() const {
    return mesh_.device();
  }
  /// What counts what this unit alone does.
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
  /// Whether this unit or one below it has the parameter.
  bool has(const at::Tensor& parameter) const;
  const std::shared_ptr<Schedule>& schedule() const {
    return schedule_;
  }
  UnitTiming& timing() const {
    return schedule_->order().timing(id_);
  }

  // What front ends announce.
  /// A full copy is about to be used, or the module begins.
  void enter(Keep keep);
  /// The same of one use: of little cost where the unit was entered last and nothing changed since.
  void use(const at::Tensor& tensor, Keep keep);
  /// Another of its modules begins, in forward; it is open since the first one.
  void come_back();
  /// `exactly`: the module is seen to end each time it runs, and the unit is closed then.
  void leave(bool exactly = false);
  /// A shard is about to be written.
  void shard_written();
  /// The parameter whose full copy lies at this memory; null when none does.
  const group::Parameter* parameter_at(const at::Tensor& tensor) const;
  /// Whether this is what stands for a parameter of its own.
  bool sees(size_t index, const at::Tensor& tensor) const {
    return index < seen_.size() && seen_[index] == tensor.unsafeGetTensorImpl();
  }
  /// The same of all of them: none was exchanged for another tensor, as a cast of one module does it.
  bool sees_all() const;
  /// This rank's parts of its own parameters.
  std::vector<at::Tensor> stored() const;
  /// From now on `shard` holds this rank's part of a parameter of its own, and the optimizer sees `visible`.
  void replace_shard(size_t index, const at::Tensor& shard, std::shared_ptr<group::VisibleParameter> visible);
  /// From now on a parameter of its own travels in its own way.
  void set_extension(size_t index, std::shared_ptr<group::Extension> extension);
  /// Null for a tensor that is no shard of this unit's.
  const group::Parameter* parameter_of_shard(const at::Tensor& tensor) const;

  // Full copies.
  /// Returns whether a gather is under way now.
  bool begin_unshard();
  void finish_unshard();
  /// `hold`: keeps what fewer ranks hold together after forward, if there is such a thing.
  void reshard(bool hold = false);
  /// Both; returns whether there was something to wait for.
  bool unshard();
  /// Whether its modules show full copies.
  bool shows_full() const {
    return shows_full_;
  }
  /// Whether it may gather in a backward, where uses are announced.
  void set_unshard_in_backward(bool value) {
    timing().unshard_in_backward = value && settings_.front_end;
  }

  /// Whether a backward runs on this thread.
  static bool in_backward();
  /// The schedule's, for the whole tree.
  void reduce_pending();
  /// Makes the groups anew when parameters were cast, moved or loaded since, their buckets when some were frozen.
  /// Raises Error when some have no values yet.
  void renew_groups();

  /// Raises an Error that names all parameters of the tree that are on the meta device.
  void need_values() const;
  /// Gives memory to those of these parameters of its own that are on the meta device.
  void provide_memory(const std::vector<at::Tensor>& parameters);
  /// Parameters were cast or moved, and nobody has taken anything from them since: they get the unit's memory. Where
  /// nobody calls this, what trains is the memory that they have at the next use, at the cost of a copy for each
  /// gather.
  void take_memory();

  /// What the handle sets; every flag is read where its name says.
  struct Options {
    bool sync = true;
    bool all_reduce = true;
    std::optional<double> divide_factor;
    bool divide_after = false;
    std::function<void(at::Tensor&)> all_reduce_hook;
    UnitRanks::Customs customs;
    std::vector<std::weak_ptr<Unit>> forward_prefetch;
    std::vector<std::weak_ptr<Unit>> backward_prefetch;
  };
  Options options;

  Plan plan() const;
  Counters counters() const;

 private:
  Unit(const Mesh& mesh, const UnitSettings& settings);
  void gradient_arriving(group::Parameter& parameter, bool defined) override;
  void gradient_arrived(group::Parameter& parameter) override;
  void gradient_published(group::Parameter& parameter) override;

  friend class Schedule;
  /// A backward ended, or failed.
  void end_backward();
  void forget_backward();
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
  /// The running backward gathered it.
  bool gathered_in_backward_ = false;
  bool shows_full_ = false;
  /// The tensors that stand for its parameters; null where a parameter shows none.
  std::vector<const at::TensorImpl*> seen_;
  std::vector<std::unique_ptr<group::Parameter>> parameters_;
  std::vector<std::unique_ptr<group::Group>> groups_;
  std::shared_ptr<Unit> outer_;
  std::shared_ptr<Schedule> schedule_;
  /// In the schedule's order.
  UnitId id_ = 0;
  Counters counters_;
  /// Where events are recorded: from the first use to the module's end, or to the last gradient.
  std::unique_ptr<observe::Span> forward_span_;
  std::unique_ptr<observe::Span> backward_span_;
};

} // namespace shardwise::engine
