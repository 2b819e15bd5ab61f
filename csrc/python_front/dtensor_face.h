#pragma once

#include "group/face.h"
#include "python_front/kept_object.h"


#include <optional>

namespace shardwise::python_front {

/// A DTensor around a shard, and DTensors around its gradients. The one around a gradient is used again once nobody
/// else holds it.
class DTensorFace : public group::Face {
 public:
  /// Made with the GIL held. `placements` are those of the full parameter where it is a DTensor too.
  DTensorFace(const pybind11::object& parameter, const pybind11::object& placements);

  const at::Tensor& parameter() const override;
  at::Tensor gradient(const at::Tensor& mean) override;
  at::Tensor memory(const at::Tensor& gradient) override;
  at::Tensor arrived(const at::Tensor& gradient) override;

 private:
  /// The object, not the tensor in it: torch exchanges that when modules are cast, if nobody else holds it.
  KeptObject parameter_;
  std::optional<KeptObject> placements_;
  std::optional<KeptObject> gradient_;
};

} // namespace shardwise::python_front
