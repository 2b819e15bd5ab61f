#include "python_front/entries.h"

namespace shardwise::python_front {

namespace py = pybind11;

void Entries::add(const std::vector<std::pair<py::object, std::string>>& owners, py::object full, py::object visible) {
  // Never freed, since the interpreter may be gone before it.
  static const auto* const plain = new py::object(py::module_::import("torch.nn").attr("Module").attr("__setattr__"));
  Entry entry{.owners = {}, .full = std::move(full), .visible = std::move(visible)};
  for (const auto& [module, name] : owners) {
    entry.owners.push_back(
        {.module = py::weakref(module),
         .parameters = module.attr("_parameters"),
         .name = py::str(name),
         .is_plain = py::object(py::type::of(module).attr("__setattr__")).is(*plain)});
  }
  entries_.push_back(std::move(entry));
}

void Entries::show(bool full) {
  for (const auto& entry : entries_) {
    const auto& object = full ? entry.full : entry.visible;
    for (const auto& owner : entry.owners) {
      if (owner.is_plain) {
        const int failed = PyObject_SetItem(owner.parameters.ptr(), owner.name.ptr(), object.ptr());
        if (failed != 0) throw py::error_already_set();
        continue;
      }
      const auto module = owner.module();
      if (!module.is_none()) module.attr(owner.name) = object;
    }
  }
}

py::object Entries::current(size_t index) const {
  const auto& owner = entries_.at(index).owners.front();
  return owner.parameters[owner.name];
}

} // namespace shardwise::python_front
