#pragma once

#include "comm/agreement.h"
#include "comm/collectives.h"
#include "engine/schedule.h"
#include "group/front.h"
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
  std::shared_ptr<group::Front> front = nullptr;
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
  /// The ranks that hold the other shards of what this one holds.
  const comm::Collectives& shards() const {
    return shards_;
  }
  /// The ranks that hold the same as this one.
  const comm::Collectives& copies() const {
    return copies_;
  }
  /// Both, in the order of the mesh's axes: together they reach all its ranks.
  std::vector<comm::Collectives> axes() const {
    return {copies_, shards_};
  }
  /// For a collective among them that belongs to no unit, once all ranks are about to issue it: `event` of the
  /// agreement.
  comm::Collectives shards_in_order(int64_t event, const char* what);
  /// All ranks come here, or get an error that names what each does: this one `text`.
  void meet(int64_t event, const std::string& text);
  /// Null where nothing is compared.
  const std::shared_ptr<comm::Agreement>& agreement() const {
    return agreement_;
  }
  /// Its number among the units of the agreement, the same on all ranks.
  int64_t number_for_all() const {
    return number_for_all_;
  }
  /// Whether both reach the same ranks, be it with shards or with copies.
  bool same_ranks(const Unit& other) const {
    return (shards_ == other.shards_ && copies_ == other.copies_) ||
           (shards_ == other.copies_ && copies_ == other.shards_);
  }
  /// Overwrites with the values of the mesh's first rank, on all of them.
  void spread(const at::Tensor& tensor, const std::string& what, Counters& counters) const;
  /// All ranks that take part in its sums.
  int64_t world() const {
    return int64_t{shards_.size()} * copies_.size();
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
  std::vector<std::shared_ptr<Unit>> inner() const;
  bool lies_below(const Unit& other) const;
  /// This unit and all below it, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> tree() const;
  /// Whether this unit or one below it has the parameter.
  bool has(const at::Tensor& parameter) const;
  const std::shared_ptr<Schedule>& schedule() const {
    return schedule_;
  }
  void set_schedule(std::shared_ptr<Schedule> schedule) {
    schedule_ = std::move(schedule);
  }

  // What front ends announce.
  /// A full copy is about to be used, or the module begins.
  void enter(Keep keep);
  /// The same of one use: of little cost where the unit was entered last and nothing changed since.
  void use(const at::Tensor& tensor, Keep keep);
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
  /// From now on `shard` holds this rank's part of a parameter of its own, and the optimizer sees `face`.
  void replace_shard(size_t index, const at::Tensor& shard, std::shared_ptr<group::Face> face);
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
  bool reshards_after_forward() const;
  /// Whether its modules show full copies.
  bool shows_full() const {
    return shows_full_;
  }
  bool reshards_after_backward() const {
    return options.reshard_after_backward;
  }
  bool unshards_in_backward() const {
    return settings_.front && options.unshard_in_backward;
  }

  // Gradients.
  /// Whether this unit reduces at the end of the running backward.
  bool takes_part() const;
  /// The sums of its tree wait for the end: they share a process group with its gathers or with the program's own
  /// collectives, or nobody compares the order.
  bool sums_late() const;
  /// Whether a backward runs on this thread.
  static bool in_backward();
  /// The schedule's, for the whole tree.
  void reduce_pending();
  /// What somebody put into the leaves' gradients himself counts like what a backward without synchronisation left, in
  /// the dtype of sums. Asked before each backward: what it takes is what one microbatch left.
  void take_leaf_gradients();
  /// Whether backwards without synchronisation left gradients here.
  bool has_pending() const;
  /// Whether backwards without synchronisation ended since the last sum. The same on all ranks: on some they may have
  /// left nothing here.
  bool owes() const;
  /// Starts the sum over the shards' ranks; that over the copies' ranks comes when it is done.
  void begin_reduce();
  /// Starts the second sum if the first one is done. Whether wait_reduce() would return at once.
  bool advance_reduce();
  /// Waits for the first sum and starts the second: the rest needs no event of this rank.
  void end_scatter();
  void wait_reduce();
  void publish();
  void end_backward();
  void forget_backward();
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
    CustomCollective all_gather;
    CustomCollective reduce_scatter;
    bool reshard_after_backward = true;
    bool unshard_in_backward = true;
    /// In backward it is closed once all its gradients are there, whichever module runs meanwhile.
    bool has_several_modules = false;
    std::optional<bool> reshard_after_forward;
    std::vector<std::weak_ptr<Unit>> forward_prefetch;
    std::vector<std::weak_ptr<Unit>> backward_prefetch;
  };
  Options options;

  /// The schedule's note: the user gathered it after so many forwards.
  int64_t gathered_by_hand = -1;

  /// The schedule's notes about the running backward.
  struct Backward {
    /// Parameters whose gradient is still to come.
    int64_t missing = 0;
    /// It used this unit already.
    bool entered = false;
    /// The unit was used, with gradients to come, since the last backward ended.
    bool engaged = false;
    /// It gathered this unit.
    bool gathered = false;
  };
  Backward backward;

  Plan plan() const;
  Counters counters() const;

 private:
  Unit(const Mesh& mesh, const UnitSettings& settings);
  void gradient_arriving(group::Parameter& parameter, bool defined) override;
  void gradient_arrived(group::Parameter& parameter) override;
  void gradient_published(group::Parameter& parameter) override;

  void find_ranks();
  void take_own_groups();
  void find_neighbours();
  void adopt(const std::vector<NamedTensor>& adopted);
  void check_structure(std::vector<NamedTensor>& own, const std::vector<NamedTensor>& buffers, size_t adopted);
  [[noreturn]] void refuse_shared(const NamedTensor& parameter, size_t rank) const;
  void broadcast(const std::vector<NamedTensor>& tensors);
  template <typename Do>
  void for_full_copies(const Do& act);
  /// Gathers have a process group of their own, and sums have.
  bool gathers_apart() const;
  bool sums_apart() const;
  comm::Collectives gather_in_order(const comm::Collectives& ranks);
  /// For a sum: what it is follows from what was compared before.
  comm::Collectives in_order(const comm::Collectives& collectives) const;
  /// Every group that has trained parameters.
  template <typename Do>
  void for_gradients(const Do& act);
  std::string describe() const;
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
  comm::Collectives shards_;
  comm::Collectives copies_;
  /// Among the shards' ranks, on a process group of its own where there is one.
  comm::Collectives gather_;
  /// The same on the mesh's process group, which the program knows.
  comm::Collectives known_;
  /// Among the ranks that hold everything together after forward; of nobody where those are all.
  comm::Collectives near_;
  bool gathers_have_group_ = false;
  bool sums_have_groups_ = false;
  std::shared_ptr<comm::Agreement> agreement_;
  int64_t number_for_all_ = 0;
  /// What begin_reduce() found the flags to say; unset when the running backward did not come there.
  enum class Sums : uint8_t { nothing, shards, all };
  std::optional<Sums> sums_;
  /// The sum over the shards' ranks was started and not ended.
  bool scattering_ = false;
  bool shows_full_ = false;
  /// The tensors that stand for its parameters; null where a parameter has no face.
  std::vector<const at::TensorImpl*> seen_;
  std::vector<std::unique_ptr<group::Parameter>> parameters_;
  std::vector<std::unique_ptr<group::Group>> groups_;
  std::shared_ptr<Unit> outer_;
  std::vector<std::weak_ptr<Unit>> inner_;
  std::shared_ptr<Schedule> schedule_;
  Counters counters_;
  /// Where events are recorded: from the first use to the module's end, or to the last gradient.
  std::unique_ptr<observe::Span> forward_span_;
  std::unique_ptr<observe::Span> backward_span_;
};

} // namespace shardwise::engine
