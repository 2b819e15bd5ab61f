#pragma once

#include "group/visible_parameter.h"
#include "python_front/kept_object.h"

#include <optional>
#include <vector>

namespace shardwise::python_front {

/// A DTensor around a shard, and DTensors around its gradients. One around a gradient is used again once nobody else
/// holds it: there are two at most, for the two sums that take turns.
class DTensorParameter : public group::VisibleParameter {
 public:
  /// Made with the GIL held. `to_memory` gives what is inside of a gradient that arrives, where the full parameter is a
  /// DTensor too; else None.
  DTensorParameter(const pybind11::object& parameter, const pybind11::object& to_memory);

  const at::Tensor& parameter() const override;
  at::Tensor gradient(const at::Tensor& mean) override;
  bool is_held(const at::Tensor& mean) const override;
  void release() override;
  at::Tensor memory(const at::Tensor& gradient) override;
  at::Tensor arrived(const at::Tensor& gradient) override;
  void at_once(c10::function_ref<void()> work) const override;

 private:
  struct Shown {
    KeptObject dtensor;
    /// References to what is inside, in C++ and in Python, as long as nobody else has one.
    size_t uses = 0;
    Py_ssize_t references = 0;
  };

  void put(const at::Tensor& mean, Shown& shown) const;

  /// The object, not the tensor in it: torch exchanges that when modules are cast, if nobody else holds it.
  KeptObject parameter_;
  std::optional<KeptObject> to_memory_;
  std::vector<Shown> shown_;
};

} // namespace shardwise::python_front
