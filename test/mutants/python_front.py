"""The part of the engine that Python modules see, which is in the extension module."""

from __future__ import annotations

from mutant import python_mutants

_mutant = python_mutants("csrc/python_front")

PYTHON_FRONT = [
    _mutant(
        "show what is freed",
        "entries.cpp",
        "full ? entry.full : entry.visible;",
        "!full && entry.visible.is_none() ? entry.visible : entry.full;",
        "ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "show a shared parameter to its first module alone",
        "entries.cpp",
        "    for (const auto& owner : entry.owners) {",
        "    for (const auto& owner : entry.owners) {\n      if (&owner != entry.owners.data()) break;",
        "ranks/test_fully_shard_training_compose.py ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "write past a module's own way to set a parameter",
        "entries.cpp",
        "      if (owner.is_plain) {",
        "      if (owner.is_plain || !owner.is_plain) {",
        "interop/test_interop_values.py",
    ),
    _mutant(
        "see no parameter that was replaced",
        "module_unit.cpp",
        "if (!is_same) show_as(",
        "if (!is_same && i > entries_->size()) show_as(",
        "ranks/test_fully_shard_state.py interop/test_interop_checkpoints.py",
    ),
    _mutant(
        "say nothing of a parameter that was replaced by a plain one",
        "module_unit.cpp",
        'if (!py::hasattr(parameter, "_local_tensor")) {',
        'if (!py::hasattr(parameter, "_local_tensor") && i > entries_->size()) {',
        "ranks/test_replicate_contract.py",
    ),
    _mutant(
        "close a unit of several modules where the first of them ends",
        "module_unit.cpp",
        "  if (!to_run_.empty()) return false;\n",
        "",
        "interop/test_interop_lists.py ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "begin a unit of several modules anew at each of them",
        "module_unit.cpp",
        "  if (to_run_.contains(module.ptr()) && unit_->shows_full()) return false;\n",
        "",
        "interop/test_interop_lists.py ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "watch no output for its backward",
        "module_unit.cpp",
        "  if (c10::GradMode::is_enabled()) {",
        "  if (c10::GradMode::is_enabled() && to_memory_.size() > 1000) {",
        "ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "convert no outputs",
        "module_unit.cpp",
        "return convert_outputs_.is_none() ? py::none()",
        "return convert_outputs_.is_none() || modules_.size() == 1 ? py::none()",
        "ranks/test_fully_shard_training_inputs.py interop/test_interop_values.py "
        "ranks/test_fully_shard_training_core.py",
    ),
    _mutant(
        "give shards an offset in their memory",
        "module_unit.cpp",
        "if (piece.is_meta()) return piece;",
        "if (piece.is_meta() || piece.numel() > 0) return piece;",
        "ranks/test_fully_shard_state.py interop/test_interop_checkpoints.py interop/test_interop_training.py",
    ),
    _mutant(
        "write the next gradient over one that somebody holds",
        "dtensor_parameter.cpp",
        "!is_ours_alone(dtensor) || mean.use_count() != shown.uses ||",
        "",
        "interop/test_interop_gradients.py",
    ),
    _mutant(
        "find no tensors in dataclasses",
        "tensors_in.cpp",
        'py::hasattr(value, "__dataclass_fields__") && ',
        'py::hasattr(value, "__no_fields__") && ',
        "interop/test_interop_containers.py",
    ),
    _mutant(
        "let a tensor of a user's all-gather live on",
        "python_extension.cpp",
        '  protocol_.get().attr("free")();\n',
        "",
        "ranks/test_fully_shard_extensions.py",
    ),
    _mutant(
        "let freed parameters be read",
        "module_unit.cpp",
        '    return c10::str(\n        "shardwise: the full parameter ", names,\n',
        '    if (!names.empty()) return {};\n    return c10::str(\n        "shardwise: the full parameter ", names,\n',
        "ranks/test_second_order.py",
    ),
]
