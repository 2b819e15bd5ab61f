#include "bindings/handle.h"

namespace shardwise::bindings {

namespace py = pybind11;
using python_front::KeptObject;

std::vector<Unit> handles(const std::vector<AnyUnit>& units) {
  std::vector<Unit> handles;
  for (const auto& unit : units) {
    const auto* of_module = std::get_if<std::shared_ptr<python_front::ModuleUnit>>(&unit);
    handles.push_back(of_module != nullptr ? handle_of(**of_module) : std::get<Unit>(unit));
  }
  return handles;
}

CustomCollective custom(const py::object& comm, bool sums) {
  if (comm.is_none()) return {};
  return [comm = KeptObject(comm), sums](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
    const py::gil_scoped_acquire gil;
    py::dict keywords;
    keywords["output_tensor"] = output;
    keywords["input_tensor"] = input;
    keywords["group"] = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group);
    if (sums) keywords["op"] = py::module_::import("torch.distributed").attr("ReduceOp").attr("SUM");
    keywords["async_op"] = true;
    const auto work = comm.get()(**keywords);
    return work.is_none() ? c10::intrusive_ptr<c10d::Work>() : work.cast<c10::intrusive_ptr<c10d::Work>>();
  };
}

std::function<void(at::Tensor&)> all_reduce_hook(const py::object& hook) {
  if (hook.is_none()) return {};
  return [hook = KeptObject(hook)](at::Tensor& sum) {
    const py::gil_scoped_acquire gil;
    hook.get()(sum);
  };
}

std::map<std::string, int64_t> named(const Counters& counters) {
  std::map<std::string, int64_t> result;
  for (const auto& counter : detail::kCounters) result.emplace(counter.name, counters.*counter.of);
  return result;
}

} // namespace shardwise::bindings
