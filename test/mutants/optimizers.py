"""Optimizers and GradScaler: what is kept for a parameter, who counts steps, and which ranks skip one."""

from __future__ import annotations

from mutant import Mutant


def _optimizer(name: str, file: str, old: str, new: str, suites: str) -> Mutant:
    return Mutant(name, f"csrc/optim/{file}", old, new, suites=suites)


_FUSED = "FusedOptimizers.*"
_LIFE = "OptimizerLife.*"
_SCALING = "GradientScaling.*"
_DICT = "OptimizerStateDict.*"

OPTIMIZERS = [
    _optimizer(
        "count steps without those that the program set",
        "counted_state.h",
        " || steps != known_",
        "",
        _LIFE,
    ),
    _optimizer(
        "let gradients lie otherwise in memory than their parameters",
        "fused_batch.cpp",
        "if (gradient.strides() != parameter.strides())",
        "if (gradient.dim() != parameter.dim())",
        _LIFE,
    ),
    _optimizer(
        "step twice on a parameter that is listed twice",
        "fused_batch.cpp",
        "if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;",
        "seen.insert(parameter.unsafeGetTensorImpl());\n      if (!gradient.defined()) continue;",
        _LIFE,
    ),
    _optimizer(
        "take the options of the first group for all",
        "adam.cpp",
        "const auto& options = options_of(batch.group);",
        "const auto& options = options_of(0);",
        _FUSED,
    ),
    _optimizer(
        "forget the momentum after a step",
        "sgd.cpp",
        "i < buffers.size(); ++i)",
        "i + 1 < buffers.size(); ++i)",
        _FUSED,
    ),
    _optimizer(
        "begin momentum of zero where it begins with the gradient",
        "sgd.cpp",
        "/*maximize=*/false, is_first, scale",
        "/*maximize=*/false, is_first && false, scale",
        _FUSED,
    ),
    _optimizer(
        "skip a step where this rank's gradients are infinite, and other ranks none",
        "finite_check.cpp",
        "  for (const auto& unit : meshes.shards()) {",
        "  for (const auto& unit : nn::UnitMeshes::Units()) {",
        _SCALING,
    ),
    _optimizer(
        "scale later steps without a scaler as the last one with it",
        "grad_scaler.cpp",
        "  clear();\n  progress.stage",
        "  progress.stage",
        _SCALING,
    ),
    _optimizer(
        "look only at gradients of the first dtype",
        "finite_check.cpp",
        "  for (const auto& alike : found.gradients) {",
        "  for (const auto& alike : found.gradients) {\n    if (&alike != &found.gradients.front()) break;",
        _SCALING,
    ),
    _optimizer(
        "load an optimizer's state without its options",
        "load_optimizer_state.cpp",
        "    state.set_options(load.parameters[i].group, options);\n",
        "",
        _DICT,
    ),
    _optimizer(
        "load whole state where a shard's belongs",
        "load_optimizer_state.cpp",
        "  return entry.copies == nullptr ? piece : entry.copies->piece_in_whole(entry.index, piece);",
        "  return entry.copies == nullptr ? piece : whole;",
        _DICT,
    ),
]
