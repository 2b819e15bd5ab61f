#pragma once

#include "group/face.h"
#include "python_front/kept_object.h"

#include <optional>

namespace shardwise::python_front {

/// A DTensor around a shard, and DTensors around its gradients. The one around a gradient is used again once nobody
/// else holds it.
class DTensorFace : public group::Face {
 public:
  /// Made with the GIL held. `to_memory` gives what is inside of a gradient that arrives, where the full parameter is a
  /// DTensor too; else None.
  DTensorFace(const pybind11::object& parameter, const pybind11::object& to_memory);

  const at::Tensor& parameter() const override;
  at::Tensor gradient(const at::Tensor& mean) override;
  void release() override;
  at::Tensor memory(const at::Tensor& gradient) override;
  at::Tensor arrived(const at::Tensor& gradient) override;

 private:
  /// The object, not the tensor in it: torch exchanges that when modules are cast, if nobody else holds it.
  KeptObject parameter_;
  std::optional<KeptObject> to_memory_;
  std::optional<KeptObject> gradient_;
};

} // namespace shardwise::python_front
