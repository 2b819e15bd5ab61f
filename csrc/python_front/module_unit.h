#pragma once

#include "engine/front_end.h"
#include "python_front/entries.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace shardwise::python_front {

/// A parameter as Python hands it over. The module computes with `full`. Its attribute is `full` or the optimizer's
/// parameter, in turns.
struct GivenParameter {
  std::vector<std::string> names;
  std::vector<std::pair<pybind11::object, std::string>> owners;
  /// An nn.Parameter, to which autograd brings gradients.
  pybind11::object full;
  /// The tensor inside `full` if that is a DTensor; else None.
  pybind11::object memory;
  /// The values of `full` if that has another dtype, or this rank's shard if there is an extension; else None.
  pybind11::object values;
  int64_t shard_dim;
  /// Set if it differs from the unit's options.
  std::optional<at::ScalarType> full_dtype;
  /// Set if the program chose another one than the parameter's own.
  std::optional<at::ScalarType> grad_dtype;
  /// A shardwise._extensions.Extension; None if the shard is an ordinary piece.
  pybind11::object extension;
};

/// The engine's unit of one call of fully_shard() or replicate() from Python, and what the hooks of its modules do.
///
/// Owned by Python, in the state of the modules; keeps no module alive.
class ModuleUnit : public Unit {
 public:
  using Companions = std::vector<std::shared_ptr<ModuleUnit>>;

  /// `adopted` are parameters of inner units, and `companions` units of the same call with parameters on other meshes,
  /// which this one speaks for from now on.
  ModuleUnit(
      const Mesh& mesh, std::vector<GivenParameter> parameters,
      std::vector<std::pair<std::vector<std::string>, at::Tensor>> adopted, Companions companions,
      engine::UnitSettings settings);

  engine::Unit& unit() const {
    return *unit_;
  }

  /// The memory of this rank's parts, in the order of the parameters, for DTensors to wrap.
  std::vector<at::Tensor> shards() const;
  /// From now on parameter number `index` appears as this DTensor, in its modules too.
  void show_as(size_t index, const pybind11::object& parameter, const pybind11::object& to_memory);
  /// `extend(index)` makes the Extension of a parameter whose shard turns out to have the methods of one.
  void set_extend(pybind11::object extend);
  /// Reads the parameters from the modules' attributes again: a cast, a load or an exchange may have replaced them.
  void look_again();
  /// The same right after a cast: moves its results into the unit's memory, before the program can refer to them.
  void take_memory();

  /// The modules that this unit is made of. If there are several, it begins with the first one that runs, and ends with
  /// the last.
  void set_modules(const std::vector<pybind11::object>& modules);
  /// What the inputs and outputs of each module's call go through; None: nothing.
  void set_conversions(pybind11::object inputs, pybind11::object outputs);

  /// For hooks of nn.Module. post_forward() is also called if the forward failed.
  pybind11::object pre_forward(
      pybind11::handle module, const pybind11::object& arguments, const pybind11::object& keywords);
  pybind11::object post_forward(
      pybind11::handle module, const pybind11::object& arguments, const pybind11::object& output);
  /// After pre_forward(), in the place of post_forward().
  void fail_forward();

 private:
  /// A call of a module that runs.
  struct Call {
    int thread;
    bool has_turn;
    /// The exception that was handled when it began.
    const void* handled;
  };

  void begin_call();
  /// Whether it succeeded; unset if it had not begun.
  std::optional<bool> end_call();
  class Front;

  bool sees_all() const;
  /// Returns whether the shard has an extension that the parameter did not have.
  bool look_for_extension(size_t index, const pybind11::object& shard);
  bool begins(pybind11::handle module);
  bool ends(pybind11::handle module);

  std::shared_ptr<Entries> entries_ = std::make_shared<Entries>();
  std::shared_ptr<engine::Unit> unit_;
  Companions companions_;
  std::vector<pybind11::object> to_memory_;
  pybind11::object extend_ = pybind11::none();
  std::vector<Call> calls_;
  std::set<const void*> modules_;
  std::set<const void*> to_run_;
  /// The modules that the last forward began and ended with.
  const void* first_ = nullptr;
  const void* last_ = nullptr;
  pybind11::object convert_inputs_ = pybind11::none();
  pybind11::object convert_outputs_ = pybind11::none();
};

} // namespace shardwise::python_front
