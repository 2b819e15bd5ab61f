#pragma once

#include "group/visible_parameter.h"
#include "python_front/kept_object.h"

#include <optional>
#include <vector>

namespace shardwise::python_front {

/// The DTensor that wraps a shard, and DTensors that wrap its gradients. Each of the latter is used again once nobody
/// else holds it. There are at most two, for the two sums that take turns.
class DTensorParameter : public group::VisibleParameter {
 public:
  /// To be made with the GIL held. `to_memory` is a ToMemory (_specs.py) if the full parameter is a DTensor too; else
  /// it is None.
  DTensorParameter(const pybind11::object& parameter, const pybind11::object& to_memory);

  const at::Tensor& parameter() const override;
  at::Tensor gradient(const at::Tensor& mean) override;
  bool is_held(const at::Tensor& mean) const override;
  void release() override;
  at::Tensor memory(const at::Tensor& gradient) override;
  at::Tensor arrived(const at::Tensor& gradient) override;
  bool may_sum_arriving() const override {
    return may_sum_arriving_;
  }
  void at_once(c10::function_ref<void()> work) const override;

 private:
  struct Shown {
    KeptObject dtensor;
    /// The numbers of references to the wrapped tensor, in C++ and in Python, while nobody else has one.
    size_t uses = 0;
    Py_ssize_t references = 0;
  };

  /// The Python object, not the tensor in it: torch exchanges that tensor when modules are cast, if nobody else holds
  /// it.
  KeptObject parameter_;
  std::optional<KeptObject> to_memory_;
  bool may_sum_arriving_ = false;
  std::vector<Shown> shown_;
};

} // namespace shardwise::python_front
