#pragma once

#include "group/extension.h"
#include "python_front/entries.h"
#include "python_front/kept_object.h"

#include <memory>

namespace shardwise::python_front {

/// torch's protocol for parameters that gather themselves, as shardwise._extensions implements it in Python.
class PythonExtension : public group::Extension {
 public:
  /// For parameter number `index` of the entries. `protocol` is a shardwise._extensions.Extension.
  PythonExtension(const std::shared_ptr<Entries>& entries, size_t index, const pybind11::object& protocol);

  std::vector<at::Tensor> inputs() override;
  std::optional<Leaf> make_full(const std::vector<at::Tensor>& outputs) override;
  void free() override;

 private:
  /// The entries may be gone, since they go with the modules.
  std::weak_ptr<Entries> entries_;
  size_t index_;
  /// Whether make_full() made the leaf.
  bool has_made_ = false;
  KeptObject protocol_;
};

} // namespace shardwise::python_front
