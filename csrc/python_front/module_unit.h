#pragma once

#include "engine/front_end.h"
#include "python_front/entries.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace shardwise::python_front {

/// A parameter as Python hands it over. `full` is what the module computes with; the module shows it or `visible`.
struct GivenParameter {
  std::vector<std::string> names;
  std::vector<std::pair<pybind11::object, std::string>> owners;
  /// An nn.Parameter, which autograd brings gradients to.
  pybind11::object full;
  /// The tensor inside of `full` where that is a DTensor; None otherwise.
  pybind11::object memory;
  /// The values of `full` if it is of another dtype, and this rank's shard where there is an extension; else None.
  pybind11::object values;
  int64_t shard_dim;
  /// A shardwise._extensions.Extension; None where the shard is a piece like any other.
  pybind11::object extension;
};

/// The engine's unit of one call of fully_shard() or replicate() from Python, with what its modules' hooks do.
///
/// Python owns it, from the state of the modules; it keeps no module alive.
class ModuleUnit {
 public:
  ModuleUnit(
      const Mesh& mesh, std::vector<GivenParameter> parameters,
      std::vector<std::pair<std::vector<std::string>, at::Tensor>> adopted, engine::UnitSettings settings);

  Unit handle() const {
    return Unit(unit_);
  }
  engine::Unit& unit() const {
    return *unit_;
  }

  /// This rank's parts, in the order of the parameters: their memory, which DTensors are to be around.
  std::vector<at::Tensor> shards() const;
  /// From now on parameter number `index` is seen as this DTensor, by its modules too.
  void show_as(size_t index, const pybind11::object& parameter, const pybind11::object& to_memory);
  /// `extend(index)` gives the Extension of a parameter whose shard is found to have the methods of one.
  void set_extend(pybind11::object extend);
  /// The parameters that are seen are read from the modules again: a cast, a load or an exchange may have replaced
  /// them.
  void look_again();
  /// The same where a cast just ended, whose results nobody has yet: they get the unit's memory.
  void take_memory();

  /// The modules that this unit is of, where there are several: it begins with the first one that runs, and ends with
  /// the last.
  void set_modules(const std::vector<pybind11::object>& modules);
  /// What the inputs of a call, and its outputs, go through, of each of the modules; None: nothing.
  void set_conversions(pybind11::object inputs, pybind11::object outputs);

  /// As hooks of nn.Module.
  pybind11::object pre_forward(
      pybind11::handle module, const pybind11::object& arguments, const pybind11::object& keywords);
  pybind11::object post_forward(
      pybind11::handle module, const pybind11::object& arguments, const pybind11::object& output);

 private:
  class Front;

  /// Whether it found one that the parameter had not.
  bool look_for_extension(size_t index, const pybind11::object& shard);
  bool begins(pybind11::handle module);
  bool ends(pybind11::handle module);

  std::shared_ptr<Entries> entries_ = std::make_shared<Entries>();
  std::shared_ptr<engine::Unit> unit_;
  std::vector<pybind11::object> to_memory_;
  pybind11::object extend_ = pybind11::none();
  std::set<const void*> modules_;
  std::set<const void*> to_run_;
  /// Those that the last forward began and ended with.
  const void* first_ = nullptr;
  const void* last_ = nullptr;
  pybind11::object convert_inputs_ = pybind11::none();
  pybind11::object convert_outputs_ = pybind11::none();
};

} // namespace shardwise::python_front
