#include "python_front/python_extension.h"

#include <pybind11/stl.h>

namespace shardwise::python_front {

namespace py = pybind11;

PythonExtension::PythonExtension(const std::shared_ptr<Entries>& entries, size_t index, const py::object& protocol)
    : entries_(entries),
      index_(index),
      protocol_(protocol) {}

std::vector<at::Tensor> PythonExtension::inputs() {
  const py::gil_scoped_acquire gil;
  const auto entries = entries_.lock();
  if (!entries) return {};
  return py::cast<std::vector<at::Tensor>>(protocol_.get().attr("inputs")((*entries)[index_].visible));
}

std::optional<group::Extension::Leaf> PythonExtension::make_full(const std::vector<at::Tensor>& outputs) {
  const py::gil_scoped_acquire gil;
  const auto entries = entries_.lock();
  if (!entries) return std::nullopt;
  auto& entry = (*entries)[index_];
  const py::object before = has_made_ ? entry.full : py::none();
  const py::object made = protocol_.get().attr("make_full")(entry.visible, outputs, before);
  if (has_made_) return std::nullopt;
  has_made_ = true;
  const auto [full, memory] = py::cast<std::pair<py::object, py::object>>(made);
  entry.full = full;
  return Leaf{py::cast<at::Tensor>(full), memory.is_none() ? at::Tensor() : py::cast<at::Tensor>(memory)};
}

void PythonExtension::free() {
  const py::gil_scoped_acquire gil;
  protocol_.get().attr("free")();
}

} // namespace shardwise::python_front
