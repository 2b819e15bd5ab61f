"""Dtypes of full copies, sums, inputs and outputs."""

from __future__ import annotations

from mutant import BOTH, Mutant

MIXED = "FullyShardMixedPrecision.*"

PRECISION = [
    Mutant(
        "divide by nothing after the sum",
        "csrc/group/gradients_publish.cpp",
        "      if (after_ != 1) mean.mul_(after_);\n",
        "",
        suites=MIXED,
    ),
    Mutant(
        "divide half precision before the sum alone",
        "csrc/group/gradients.cpp",
        "? first_part(rule.divisor)",
        "? first_part(1) * rule.divisor",
        suites=MIXED,
    ),
    Mutant(
        "sum in the dtype of the full copies",
        "csrc/group/outline.cpp",
        "sum_dtype_(cast(dtype_, policy.sum_dtype, kind.grad_dtype.value_or(dtype_)))",
        "sum_dtype_(full_dtype_)",
        suites=MIXED,
    ),
    Mutant(
        "sum in the dtype of the full copies where none is named",
        "csrc/group/outline.cpp",
        "sum_dtype_(cast(dtype_, policy.sum_dtype, kind.grad_dtype.value_or(dtype_)))",
        "sum_dtype_(cast(dtype_, policy.sum_dtype, full_dtype_))",
        suites=MIXED,
    ),
    Mutant(
        "add up unsynchronised gradients in their own dtype",
        "csrc/group/parameter.cpp",
        "fresh_.to(sum_dtype_.value_or(fresh_.scalar_type()))",
        "fresh_",
        suites=MIXED,
    ),
    Mutant(
        "round gradients before they are summed",
        "csrc/group/parameter.cpp",
        "  base::set_grad_dtype(tensor, stays ? std::nullopt : sum_dtype_);\n",
        "",
        suites="ParameterDtypes.*",
        languages=BOTH,
    ),
    Mutant(
        "cast nothing in direct calls",
        "csrc/nn/touch/touch.cpp",
        "  if (caster) cast_arguments(schema, *stack, *caster->wanted_dtype(), *caster);\n",
        "",
        suites=MIXED,
    ),
    Mutant(
        "cast buffers",
        "csrc/nn/touch/argument_cast.cpp",
        "!listener.spares(tensor)",
        "(!listener.spares(tensor) || true)",
        suites=MIXED,
    ),
    Mutant(
        "cast what an operation writes to",
        "csrc/nn/touch/argument_cast.cpp",
        "    if (alias != nullptr && alias->isWrite()) continue;\n",
        "    (void)alias;\n",
        suites=MIXED,
    ),
    Mutant(
        "cast operation by operation in calls that are seen",
        "csrc/nn/touch/unit_touch.cpp",
        "!dtype || calls > 0 ||",
        "!dtype ||",
        suites=MIXED,
    ),
    Mutant(
        "take a call that failed for one that runs",
        "csrc/nn/hooks/unit_hooks.cpp",
        "ForwardHookOptions().always_call(true)",
        "{}",
        suites=MIXED,
    ),
    Mutant(
        "leave the inputs of a call as they are",
        "csrc/nn/hooks/unit_hooks.cpp",
        "    if (self->precision().cast_forward_inputs()) cast(inputs, self->precision().param_dtype());\n",
        "",
        suites=MIXED,
    ),
    Mutant(
        "leave the outputs of a call as they are",
        "csrc/nn/hooks/unit_hooks.cpp",
        "      cast(outputs, dtype);\n",
        "      (void)outputs;\n",
        suites=MIXED,
    ),
    Mutant(
        "give gradients in the dtype of the sum",
        "csrc/group/gradients_publish.cpp",
        "converted.push_back(mean.to(kind));",
        "converted.push_back(mean.to(kind.device()));",
        suites=MIXED,
    ),
]
