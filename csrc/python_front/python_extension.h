#pragma once

#include "group/extension.h"
#include "python_front/entries.h"
#include "python_front/kept_object.h"

#include <memory>

namespace shardwise::python_front {

/// torch's protocol for parameters that gather themselves, which Python's shardwise._extensions speaks.
class PythonExtension : public group::Extension {
 public:
  /// Of the parameter with this number there. `protocol` is a shardwise._extensions.Extension.
  PythonExtension(const std::shared_ptr<Entries>& entries, size_t index, const pybind11::object& protocol);

  std::vector<at::Tensor> inputs() override;
  std::optional<Leaf> make_full(const std::vector<at::Tensor>& outputs) override;
  void free() override;

 private:
  /// Entries may be gone: they go with the modules.
  std::weak_ptr<Entries> entries_;
  size_t index_;
  /// The leaf is one that this made.
  bool has_made_ = false;
  KeptObject protocol_;
};

} // namespace shardwise::python_front
