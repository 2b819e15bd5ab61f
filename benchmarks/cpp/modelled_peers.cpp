// The Python module modelled_peers: process groups whose other ranks are not there, with or without a modelled wire.
#include "host_wire.h"
#include "instant_group.h"
#ifdef SHARDWISE_WITH_CUDA
#include "stream_wire.h"
#endif

#include <torch/csrc/utils/pybind.h>

namespace {

namespace py = pybind11;

std::shared_ptr<Wire> make_wire(const std::string& device_name) {
  const c10::Device device(device_name);
#ifdef SHARDWISE_WITH_CUDA
  if (device.is_cuda()) return std::make_shared<StreamWire>(device);
#endif
  if (device.is_cpu()) return std::make_shared<HostWire>();
  throw std::invalid_argument("bench: no wire was built for the device " + device_name + ".");
}

void set_speed(Wire& wire, double microseconds, double megabytes) {
  wire.set_speed({Wire::Seconds(1e-6 * microseconds), 1e6 * megabytes});
}

c10::intrusive_ptr<c10d::Backend> peers(const std::shared_ptr<Wire>& wire, int rank, int size) {
  return wire->over(c10::make_intrusive<InstantBackend>(rank, size));
}

c10::intrusive_ptr<c10d::Backend> instant(int rank, int size) {
  return c10::make_intrusive<InstantBackend>(rank, size);
}

void set_answers(c10d::Backend& backend, bool answers) {
  dynamic_cast<InstantBackend&>(backend).answers = answers;
}

} // namespace

PYBIND11_MODULE(modelled_peers, module) {
  py::module_::import("torch");
  py::class_<Wire, std::shared_ptr<Wire>>(module, "Wire")
      .def(py::init(&make_wire), py::arg("device"))
      .def("set_speed", &set_speed, py::arg("microseconds"), py::arg("megabytes"), "Latency, and bandwidth a second.")
      .def("busy_seconds", [](const Wire& wire) { return wire.busy().count(); })
      .def("bytes", &Wire::bytes)
      .def("peers", &peers, py::arg("rank"), py::arg("size"), "A back end for torch.distributed.");
  module.def("instant", &instant, py::arg("rank"), py::arg("size"), "A back end whose collectives are done at once.");
  module.def("set_answers", &set_answers, "Whether gathers of instant() give every rank's part this one's values.");
}
