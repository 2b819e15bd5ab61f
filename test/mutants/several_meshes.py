"""Parameters of one call on meshes of their own, lists that run in part, and units that keep memory and dtypes."""

from __future__ import annotations

from mutant import Mutant, python_mutants

_package = python_mutants("python/shardwise")
_front = python_mutants("csrc/python_front")

_MESH = "ParameterMesh.*"
_DTYPES = "ParameterDtypes.*"
_FLIGHT = "SumsInFlight.*"

MESHES = [
    Mutant(
        "enter a companion without its head",
        "csrc/engine/order.cpp",
        "const auto unit = units_[entered].head;",
        "const auto unit = entered;",
        suites=_MESH,
    ),
    Mutant(
        "gather companions when they are used",
        "csrc/engine/order.cpp",
        "  const auto& companions = units_[head].companions;\n  for",
        "  const std::vector<UnitId> companions;\n  for",
        suites=_MESH,
    ),
    Mutant(
        "leave companions out of the order of sums",
        "csrc/engine/order.cpp",
        "  for (const auto companion : units_[unit].companions) sums_.push_back(companion);\n",
        "",
        suites=_MESH,
    ),
    Mutant(
        "divide by a factor on the call's own mesh alone",
        "csrc/engine/handle.cpp",
        "  for (const auto& unit : unit_->call()) unit->options.divide_factor = factor;\n",
        "  unit_->options.divide_factor = factor;\n",
        suites="FullyShardNDTraining.*",
    ),
    Mutant(
        "add up experts over their own mesh alone",
        "csrc/nn/wrap/unit_meshes.h",
        "unit->ranks().world() < widest_->ranks().world()",
        "unit->ranks().world() < 0",
        suites=_MESH,
    ),
    Mutant(
        "shard all parameters over the mesh of the call",
        "csrc/nn/wrap/fully_shard.cpp",
        "if (!mesh || mesh->is_same(own)) {",
        "if (!mesh || mesh->is_same(own) || mesh->ndim() > 0) {",
        suites="FullyShardNDTraining.*",
    ),
    Mutant(
        "let one sum be under way whatever is allowed",
        "csrc/engine/order_backward.cpp",
        "in_flight_.size() < most_in_flight_ ||",
        "in_flight_.empty() ||",
        suites=_FLIGHT,
    ),
    Mutant(
        "give the memory of full copies away although it is kept",
        "csrc/group/full_copies.cpp",
        "  if (!keeps_memory) buffers.give(std::exchange(memory_, at::Tensor()));",
        "  if (!keeps_memory || memory_.defined()) buffers.give(std::exchange(memory_, at::Tensor()));",
        suites=_FLIGHT,
    ),
    Mutant(
        "cast parameters that are to keep their dtype",
        "csrc/group/outline.cpp",
        "kind.full_dtype ? kind.full_dtype : policy.full_dtype",
        "policy.full_dtype",
        suites=_DTYPES,
    ),
    Mutant(
        "publish gradients in the parameter's dtype whatever the program wants",
        "csrc/group/gradients_publish.cpp",
        "  return first.grad_dtype ? kind.dtype(first.grad_dtype) : kind;\n",
        "  return kind;\n",
        suites=_DTYPES,
    ),
    _package(
        "put all parameters on the mesh of the call",
        "_parameters.py",
        "        mesh = each.mesh or own\n",
        "        mesh = own\n",
        "ranks/test_shard_placement.py",
    ),
    _package(
        "cast what the policy lets be",
        "_precision.py",
        "    return chosen\n",
        "    return None\n",
        "ranks/test_fully_shard_mixed_precision.py",
    ),
    Mutant(
        "free the parameters of a call on its own mesh alone",
        "csrc/engine/handle.cpp",
        "  for (const auto& unit : unit_->call()) unit->reshard();\n",
        "  unit_->reshard();\n",
        suites=_MESH,
    ),
    _front(
        "begin no backward at a derivative",
        "tensors_in.cpp",
        "if (derivative.defined())",
        "if (derivative.defined() && derivative.dim() < 0)",
        "ranks/test_replicate_mixed_precision.py",
    ),
    Mutant(
        "overwrite what an earlier chunk of the loss brought",
        "csrc/group/parameter.cpp",
        "(visible_ ? visible_->memory(grad) : grad).add_(mean);",
        "(visible_ ? visible_->memory(grad) : grad).copy_(mean);",
        suites="FullyShard1DTrainingCompose.PartialGroupForward*",
    ),
    Mutant(
        "reshard whatever was set meanwhile",
        "csrc/engine/order.cpp",
        "reshards_after_forward(unit);\n    if (frees)",
        "true;\n    if (frees)",
        suites="FullyShard1DTrainingCompose.PartialGroupReshardToggle",
    ),
    Mutant(
        "cast the inputs of no module of a list",
        "csrc/nn/hooks/unit_hooks.cpp",
        "    if (self->precision().cast_forward_inputs()) cast(inputs, self->precision().param_dtype());\n",
        "",
        suites="FullyShard1DTrainingCompose.GroupedModuleCastForwardInputs",
    ),
    _front(
        "add what a later chunk of the loss brings to a copy",
        "dtensor_parameter.cpp",
        "  return py::cast<at::Tensor>(local_of(object));\n",
        "  return py::cast<at::Tensor>(local_of(object)).clone();\n",
        "ranks/test_fully_shard_training_partial.py",
    ),
    _package(
        "cast the inputs of no call",
        "_conversions.py",
        "        inputs.append(partial(_cast_inputs, precision.param_dtype))\n",
        "        pass\n",
        "ranks/test_fully_shard_training_partial.py",
    ),
    _package(
        "set for one module whether it is freed after forward, though for all",
        "_module_classes.py",
        "            state.unit.set_reshard_after_forward(reshard_after_forward)\n",
        "            if state is wrapped_state(self):\n"
        "                state.unit.set_reshard_after_forward(reshard_after_forward)\n",
        "ranks/test_fully_shard_training_partial.py",
    ),
]
