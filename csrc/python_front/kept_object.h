#pragma once

#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace shardwise::python_front {

/// A Python object that may be let go of without the GIL. To be used with the GIL held.
class KeptObject {
 public:
  explicit KeptObject(pybind11::object object)
      : object_(std::make_shared<c10::SafePyObject>(object.release().ptr(), getPyInterpreter())) {}

  pybind11::handle get() const {
    return object_->ptr(getPyInterpreter());
  }

 private:
  std::shared_ptr<c10::SafePyObject> object_;
};

} // namespace shardwise::python_front
