#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace shardwise::python_front {

/// The places of a unit's parameters in its modules, and the two objects that take turns there: the full parameter and
/// the one that the optimizer has. Python owns it. It owns no module, and the unit must not own it: the full parameters
/// in here own the unit.
///
/// To be used with the GIL held.
class Entries {
 public:
  /// A module that has the parameter, and its name there.
  struct Owner {
    pybind11::weakref module;
    /// The module's _parameters.
    pybind11::dict parameters;
    pybind11::str name;
    /// Whether its class has nn.Module's own __setattr__. Recurrent modules override it to learn of changes.
    bool is_plain;
  };
  struct Entry {
    std::vector<Owner> owners;
    pybind11::object full;
    pybind11::object visible;
  };

  /// Takes (module, name) for each owner.
  void add(
      const std::vector<std::pair<pybind11::object, std::string>>& owners, pybind11::object full,
      pybind11::object visible);
  size_t size() const {
    return entries_.size();
  }
  void show(bool full);
  /// What the module has now.
  pybind11::object current(size_t index) const;
  Entry& operator[](size_t index) {
    return entries_.at(index);
  }

 private:
  std::vector<Entry> entries_;
};

} // namespace shardwise::python_front
