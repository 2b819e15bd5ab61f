#include "python_front/module_unit.h"

#include "python_front/dtensor_parameter.h"
#include "python_front/python_extension.h"

#include <shardwise/error.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>

namespace shardwise::python_front {

namespace py = pybind11;

/// The unit uses this to tell its modules what to show. The entries may be gone, since they go with the modules.
class ModuleUnit::Front : public group::FrontEndCallbacks {
 public:
  explicit Front(const std::weak_ptr<Entries>& entries) : entries_(entries) {}

  void mark(const at::Tensor& /*tensor*/) override {}
  // The result has a storage of its own, without an offset. A DTensor takes over the offset of the tensor that it
  // wraps, and torch takes a DTensor with an offset for one that has memory itself, as in copy.deepcopy(). And a
  // saved shard has its whole storage.
  at::Tensor shown(const at::Tensor& piece) override {
    if (piece.is_meta()) return piece;
    if (piece.numel() == 0) return at::empty_strided(piece.sizes(), piece.strides(), piece.options());
    return at::for_blob(piece.data_ptr(), piece.sizes())
        .strides(piece.strides())
        .options(piece.options())
        .target_device(piece.device())
        .context(new at::Tensor(piece), [](void* kept) { delete static_cast<at::Tensor*>(kept); })
        .make_tensor();
  }
  std::shared_ptr<void> watch(const at::Tensor& /*tensor*/, Role /*role*/) override {
    return nullptr;
  }
  std::string read_error(const std::string& names) const override {
    return c10::str(
        "shardwise: the full parameter ", names,
        " was read while it is freed or out of date. It is there in its module's forward and backward. Call unshard() "
        "of the module before other reads, and reshard() after them. For gradients of gradients (create_graph=True) "
        "call set_reshard_after_forward(False) and set_reshard_after_backward(False) before the forward: the second "
        "backward reads what the first one did.");
  }
  void show(bool full) override {
    const py::gil_scoped_acquire gil;
    if (const auto entries = entries_.lock()) entries->show(full);
  }

 private:
  std::weak_ptr<Entries> entries_;
};

ModuleUnit::ModuleUnit(
    const Mesh& mesh, std::vector<GivenParameter> parameters,
    std::vector<std::pair<std::vector<std::string>, at::Tensor>> adopted, Companions companions,
    engine::UnitSettings settings)
    : Unit(nullptr),
      companions_(std::move(companions)) {
  std::vector<engine::NamedTensor> tensors;
  settings.front_end = std::make_shared<Front>(entries_);
  for (auto& given : parameters) {
    entries_->add(given.owners, given.full, given.full);
    auto& tensor = tensors.emplace_back();
    tensor.names = std::move(given.names);
    tensor.tensor = py::cast<at::Tensor>(given.full);
    tensor.shard_dim = given.shard_dim;
    tensor.full_dtype = given.full_dtype;
    tensor.grad_dtype = given.grad_dtype;
    if (!given.memory.is_none()) tensor.full = py::cast<at::Tensor>(given.memory);
    if (!given.values.is_none()) tensor.values = py::cast<at::Tensor>(given.values);
    if (!given.extension.is_none()) {
      tensor.extension = std::make_shared<PythonExtension>(entries_, entries_->size() - 1, given.extension);
    }
    const auto& values = tensor.values.defined() ? tensor.values : tensor.full.defined() ? tensor.full : tensor.tensor;
    const auto dtype = values.scalar_type();
    tensor.whole =
        !tensor.extension && settings.shares(dtype, settings.full_dtype(dtype, given.full_dtype), mesh.device());
  }
  for (auto& [names, tensor] : adopted) tensors.push_back({.names = std::move(names), .tensor = std::move(tensor)});
  for (const auto& companion : companions_) {
    for (auto& named : companion->unit_->named_parameters()) tensors.push_back(std::move(named));
  }
  const py::gil_scoped_release no_gil;
  unit_ = engine::Unit::create(mesh, std::move(tensors), {}, settings);
  Unit::operator=(Unit(unit_));
}

std::vector<at::Tensor> ModuleUnit::shards() const {
  return unit_->stored();
}

void ModuleUnit::show_as(size_t index, const py::object& parameter, const py::object& to_memory) {
  to_memory_.resize(entries_->size(), py::none());
  to_memory_[index] = to_memory;
  (*entries_)[index].visible = parameter;
  const auto local = py::cast<at::Tensor>(parameter.attr("_local_tensor"));
  // A cast or a load may have brought another parameter object.
  const auto& grad_dtype = unit_->parameters().at(index)->grad_dtype;
  if (grad_dtype) py::cast<at::Tensor>(parameter).set_grad_dtype(grad_dtype);
  unit_->replace_shard(index, local, std::make_shared<DTensorParameter>(parameter, to_memory));
}

bool ModuleUnit::sees_all() const {
  return unit_->sees_all() &&
         std::all_of(companions_.begin(), companions_.end(), [](const auto& each) { return each->unit_->sees_all(); });
}

void ModuleUnit::look_again() {
  for (const auto& companion : companions_) companion->look_again();
  if (unit_->shows_full()) return;
  const auto stored = unit_->stored();
  for (size_t i = 0; i < entries_->size(); ++i) {
    const auto parameter = entries_->current(i);
    if (!py::hasattr(parameter, "_local_tensor")) {
      throw Error(c10::str(
          "shardwise: the wrapped parameter '", unit_->parameters()[i]->name(), "' is gone: its module now holds a ",
          py::cast<std::string>(py::str(py::type::of(parameter).attr("__name__"))),
          ", whose gradient would stay on this rank alone. Replace parameters before the module is wrapped, change "
          "them in place, or load a state dict of DTensors."));
    }
    const bool is_same = !look_for_extension(i, parameter.attr("_local_tensor")) &&
                         parameter.is((*entries_)[i].visible) && unit_->sees(i, THPVariable_Unpack(parameter.ptr())) &&
                         py::cast<at::Tensor>(parameter.attr("_local_tensor")).is_same(stored[i]);
    if (!is_same) show_as(i, parameter, to_memory_[i]);
  }
}

void ModuleUnit::take_memory() {
  look_again();
  const py::gil_scoped_release no_gil;
  for (const auto& unit : unit_->call()) unit->take_memory();
}

// Somebody may have put an extension's methods on a shard after it was made.
bool ModuleUnit::look_for_extension(size_t index, const py::object& shard) {
  const auto& extension = unit_->parameters()[index]->extension();
  const bool has_methods = py::hasattr(shard, "fsdp_pre_all_gather") || py::hasattr(shard, "fsdp_post_all_gather");
  if (has_methods == (extension != nullptr)) return false;
  const auto& name = unit_->parameters()[index]->name();
  if (!has_methods) {
    throw Error(c10::str(
        "shardwise: the shard of '", name,
        "', which had fsdp_pre_all_gather() and fsdp_post_all_gather(), was replaced by one without them. Give the new "
        "one these methods too."));
  }
  if (!unit_->has_full_copies()) {
    throw Error(c10::str(
        "shardwise: the parameter '", name,
        "' got fsdp_pre_all_gather() or fsdp_post_all_gather() after replicate(). Give the tensor such methods before "
        "replicate() is called."));
  }
  unit_->set_extension(index, std::make_shared<PythonExtension>(entries_, index, extend_(index)));
  return true;
}

void ModuleUnit::set_extend(py::object extend) {
  extend_ = std::move(extend);
}

void ModuleUnit::set_modules(const std::vector<py::object>& modules) {
  for (const auto& module : modules) modules_.insert(module.ptr());
  unit_->timing().has_several_modules = modules.size() > 1;
}

void ModuleUnit::set_conversions(py::object inputs, py::object outputs) {
  convert_inputs_ = std::move(inputs);
  convert_outputs_ = std::move(outputs);
}

// A new round begins with a module that already ran in this one, or that finds the parameters sharded: not all modules
// of a unit need run. What is computed again in backward begins and ends with the same modules as in forward.
bool ModuleUnit::begins(py::handle module) {
  if (modules_.size() == 1) return true;
  if (engine::BackwardWatch::running()) return first_ == module.ptr();
  if (to_run_.contains(module.ptr()) && unit_->shows_full()) return false;
  to_run_ = modules_;
  first_ = module.ptr();
  return true;
}

bool ModuleUnit::ends(py::handle module) {
  if (modules_.size() == 1) return true;
  if (engine::BackwardWatch::running()) return last_ == module.ptr();
  to_run_.erase(module.ptr());
  if (!to_run_.empty()) return false;
  last_ = module.ptr();
  return true;
}

namespace {

/// What pytree finds in the value; the value itself if it is a leaf.
py::list leaves_of(py::handle value) {
  static const auto* const flatten = new py::object(py::module_::import("torch.utils._pytree").attr("tree_leaves"));
  return (*flatten)(value);
}

bool is_plain(py::handle value) {
  return value.is_none() || PyUnicode_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr());
}

/// What a transform of torch.func wraps has a graph of its own, and so has its derivative.
void for_each_level(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit) {
  visit(tensor);
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  if (!tensor.key_set().has_any(kWrapped)) return;
  static const auto* const unwrap = new py::object(py::module_::import("torch._C._functorch").attr("get_unwrapped"));
  for_each_level(py::cast<at::Tensor>((*unwrap)(tensor)), visit);
  const auto& derivative = tensor._fw_grad(/*level=*/0);
  if (derivative.defined()) for_each_level(derivative, visit);
}

/// Visits the tensors in what a module returned: in tuples, lists, dicts, dataclasses, and in whatever pytree knows. Of
/// one under a transform of torch.func, also what the transform wraps, and its derivative.
void for_each_tensor_in(py::handle value, const std::function<void(const at::Tensor&)>& visit) {
  if (THPVariable_Check(value.ptr())) return for_each_level(THPVariable_Unpack(value.ptr()), visit);
  if (is_plain(value)) return;
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& item : value) for_each_tensor_in(item, visit);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) for_each_tensor_in(item.second, visit);
  } else if (py::hasattr(value, "__dataclass_fields__") && !py::isinstance<py::type>(value)) {
    for (const auto& name : value.attr("__dataclass_fields__")) {
      if (py::hasattr(value, name)) for_each_tensor_in(value.attr(name), visit);
    }
  } else {
    for (const auto& leaf : leaves_of(value)) {
      if (!leaf.is(value)) for_each_tensor_in(leaf, visit);
    }
  }
}

int thread() {
  return engine::Turn::this_thread();
}

/// The exception that is being handled in this thread; null for none.
const void* handled_exception() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_GetExcInfo(&type, &value, &trace);
  const void* found = value;
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return found;
}

} // namespace

void ModuleUnit::begin_call() {
  const bool takes_turn = !engine::BackwardWatch::running();
  if (takes_turn) unit_->schedule()->turn().take(unit_->name());
  calls_.push_back({thread(), takes_turn, handled_exception()});
}

// There may be an end without a begin: a hook of the user's that failed first kept ours from seeing the begin, or it
// was not this thread's turn.
std::optional<bool> ModuleUnit::end_call() {
  if (calls_.empty() || calls_.back().thread != thread()) return std::nullopt;
  const auto call = calls_.back();
  calls_.pop_back();
  if (call.has_turn) unit_->schedule()->turn().give();
  return call.handled == handled_exception();
}

py::object ModuleUnit::pre_forward(py::handle module, const py::object& arguments, const py::object& keywords) {
  begin_call();
  if (!sees_all()) look_again();
  const bool is_first = begins(module);
  auto result = convert_inputs_.is_none() ? py::none() : convert_inputs_(arguments, keywords);
  const bool backward = engine::BackwardWatch::running();
  const py::gil_scoped_release no_gil;
  if (is_first || backward) {
    // Nothing is closed here in forward: every unit is closed when its own module ends.
    unit_->schedule()->enter(*unit_, backward ? engine::Keep::outer : engine::Keep::all_to_end);
  } else {
    unit_->schedule()->come_back(*unit_);
  }
  return result;
}

void ModuleUnit::fail_forward() {
  if (end_call() && !engine::BackwardWatch::running()) unit_->schedule()->fail_forward(*unit_);
}

// Torch calls this too when the forward failed, with None. Several modules then end as they do otherwise.
py::object ModuleUnit::post_forward(py::handle module, const py::object& /*arguments*/, const py::object& output) {
  const auto succeeded = end_call();
  if (!succeeded) return py::none();
  if (!*succeeded && modules_.size() == 1) {
    if (!engine::BackwardWatch::running()) unit_->schedule()->fail_forward(*unit_);
    return py::none();
  }
  if (c10::GradMode::is_enabled()) {
    for_each_tensor_in(output, [&](const at::Tensor& tensor) { engine::begin_backward_at(tensor, unit_); });
  }
  if (ends(module)) {
    const py::gil_scoped_release no_gil;
    unit_->schedule()->leave(*unit_, /*exactly=*/true);
  }
  return convert_outputs_.is_none() ? py::none() : convert_outputs_(output);
}

} // namespace shardwise::python_front
