// The late device for Python, where each rank is a process with a device of its own.
#include "late_device/late.h"
#include "late_device/device.h"
#include "late_device/faults.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

PYBIND11_MODULE(bound_late, module) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  late::set_around_waits([](const std::function<void()>& wait) {
    if (PyGILState_Check() == 0) return wait();
    const py::gil_scoped_release released;
    wait();
  });
  module.def("install", &late::install, NoGil(), "Makes torch's private back end the late device.");
  module.def("device_count", [] { return late::kDevices; });
  module.def("current_device", &late::current_device);
  module.def("set_device", &late::set_current_device);
  module.def(
      "synchronize", [](int device) { late::Device::of(device).synchronize_all(); }, NoGil());
  module.def("take_faults", &late::take_faults, "What the device found wrong since the last call.");
}
