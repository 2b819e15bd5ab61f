"""Modules on the meta device, and what plan() says."""

from __future__ import annotations

from mutant import Mutant

META = [
    Mutant(
        "compute with parameters that have no values",
        "csrc/engine/unit_values.cpp",
        "  if (std::none_of(groups_.begin(), groups_.end(), on_meta)) return;\n",
        "  (void)on_meta;\n  return;\n",
        suites="MetaContract.*",
    ),
    Mutant(
        "name only the first parameter without values",
        "csrc/engine/unit_values.cpp",
        "if (parameter->stored().is_meta()) names.push_back(parameter->name());",
        "if (parameter->stored().is_meta() && names.empty()) names.push_back(parameter->name());",
        suites="MetaContract.*",
    ),
    Mutant(
        "give shards memory of the size of the whole",
        "csrc/engine/unit_values.cpp",
        "at::zeros({}, options).expand(tensor.sizes())",
        "at::zeros({tensor.numel() * shards().size()}, options).narrow(0, 0, tensor.numel()).view(tensor.sizes())",
        suites="MetaContract.*",
    ),
    Mutant(
        "allocate full copies when a module is wrapped",
        "csrc/group/leaf_storage.cpp",
        "  alias_ = at::empty({0}, options);\n  alias_.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);\n",
        "  alias_ = at::empty(sizes, options);\n",
        suites="MetaContract.*",
    ),
    Mutant(
        "give tensors that name a device the meta device",
        "csrc/nn/touch/touch.cpp",
        "  if (device.isNone()) device = at::Device(at::kMeta);",
        "  device = at::Device(at::kMeta);",
        suites="MetaContract.*",
    ),
    Mutant(
        "keep the accumulator of a parameter without values",
        "csrc/group/data.cpp",
        "    meta->grad_accumulator_.reset();",
        "    (void)meta;",
        suites="MetaContract.*:MetaTraining.*",
    ),
    Mutant(
        "plan one all-gather where parts are gathered from a few ranks",
        "csrc/group/group.cpp",
        "{1, sizes.sent * (outline_.world() / step.backward_ranks)}",
        "{1, sizes.sent}",
        suites="PlanSteps.*",
    ),
    Mutant(
        "plan gathers in the dtype of the shards",
        "csrc/group/full_copies.cpp",
        "      .sent = layout_.part * compute,",
        "      .sent = layout_.part * (own > compute ? own : compute),",
        suites="PlanSteps.*",
    ),
    Mutant(
        "estimate without what is gathered ahead",
        "csrc/engine/step_memory.cpp",
        "  void gather_ahead(UnitId unit, bool /*backward*/) override {\n    begin(unit);\n",
        "  void gather_ahead(UnitId /*unit*/, bool /*backward*/) override {\n",
        suites="Estimate.*",
    ),
    Mutant(
        "estimate without the gradients that wait for their sum",
        "csrc/engine/step_memory.cpp",
        "      local_ += event.gradient;\n",
        "      local_ = event.gradient;\n",
        suites="Estimate.*",
    ),
]
