"""Tensor and pipeline parallelism: what ranks exchange, and who knows that a parameter is a piece."""

from __future__ import annotations

from mutant import Mutant

_SUITES = "TensorParallel*"
_PIPELINE = "Pipeline.*:Composability.*"

SPLIT = [
    Mutant(
        "leave out the sum of what rows computed",
        "csrc/tensor_parallel/layers.cpp",
        "  if (!is_alone) output = sum_outputs(output, exchange, how.sequence_dim());\n",
        "",
        suites=_SUITES,
    ),
    Mutant(
        "leave out the sum of the gradient of what columns read",
        "csrc/tensor_parallel/layers.cpp",
        ": InputGradient::sum;",
        ": InputGradient::own;",
        suites=_SUITES,
    ),
    Mutant(
        "add the bias of rows on each rank",
        "csrc/tensor_parallel/layers.cpp",
        "as_autocast(weight.tensor), {}, exchange, InputGradient::own",
        "as_autocast(weight.tensor), bias, exchange, InputGradient::own",
        suites=_SUITES,
    ),
    Mutant(
        "show what other ranks have of a table",
        "csrc/tensor_parallel/layers.cpp",
        "    output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0);\n",
        "",
        suites=_SUITES,
    ),
    Mutant(
        "add up no gradient of what sees a part of the activations",
        "csrc/tensor_parallel/parallelize.cpp",
        "    if (one.sums_gradient) sum_gradient(one, on);\n",
        "    if (one.sums_gradient && one.dim >= 0) sum_gradient(one, on);\n",
        suites=_SUITES,
    ),
    Mutant(
        "let every operation read a piece",
        "csrc/tensor_parallel/operations.cpp",
        "  if (!is_allowed) refuse(call);\n",
        "  if (!is_allowed && views.empty()) refuse(call);\n",
        suites=_SUITES,
    ),
    Mutant(
        "forget that a parameter is a piece when it gets other memory",
        "csrc/nn/state/shard_copies.cpp",
        "  split::split_moved();\n  add_touch_key(source);\n",
        "  split::split_moved();\n",
        suites=_SUITES,
    ),
    Mutant(
        "put only this rank's pieces into the norm",
        "csrc/nn/state/clip_grad_norm.cpp",
        "    part.reduce(*axis);\n",
        "",
        suites=_SUITES,
    ),
    Mutant(
        "skip a step only on the ranks of a piece that is not finite",
        "csrc/optim/finite_check.cpp",
        "for (const auto& axis : found.axes) total = highest(",
        "for (const auto& axis : nn::SplitAxes()) total = highest(",
        suites=_SUITES,
    ),
    Mutant(
        "save each piece as if it were the first",
        "csrc/saves/module_pieces.cpp",
        "range.start + first - start",
        "first",
        suites=_SUITES,
    ),
    Mutant(
        "free what is scattered before it was sent",
        "csrc/split/exchange.cpp",
        "return {rows, std::move(output), dim, std::move(pending)};",
        "return {output, output, dim, std::move(pending)};",
        suites=_SUITES,
        device="late",
    ),
    Mutant(
        "leave outputs in the order of memory in which they were gathered",
        "csrc/split/exchange.cpp",
        "  return output.contiguous();\n",
        "  return output;\n",
        suites=_SUITES,
    ),
    Mutant(
        "take a piece without elements for the parameter that begins where it does",
        "csrc/split/split_parameter.cpp",
        "    if (leaf.numel() == 0) return offset == 0 && tensor.numel() == 0;\n"
        "    return offset >= 0 && offset < leaf.numel();",
        "    return offset >= 0 && offset < std::max<int64_t>(leaf.numel(), 1) && tensor.defined();",
        suites=_SUITES,
    ),
    Mutant(
        "count the time that arriving inputs take as computing",
        "csrc/pipeline/run.cpp",
        "  const auto begin = std::chrono::steady_clock::now();\n  std::optional<observe::Span> span;\n",
        "  const auto begin = std::chrono::steady_clock::now() - std::chrono::hours(1);\n"
        "  std::optional<observe::Span> span;\n",
        suites=_PIPELINE,
    ),
    Mutant(
        "compute the first microbatch in the place of the last",
        "csrc/pipeline/run.cpp",
        "parts[i].push_back(pieces[i]);",
        "parts[i].push_back(pieces[i + 1 < parts.size() ? i : 0]);",
        suites=_PIPELINE,
    ),
    Mutant(
        "send microbatches in another order than they are received",
        "csrc/pipeline/run.cpp",
        "* place_.table.microbatches + action.microbatch;",
        "* place_.table.microbatches +\n"
        "      (is_send(action.kind) ? place_.table.microbatches - 1 - action.microbatch : action.microbatch);",
        suites=_PIPELINE,
    ),
    Mutant(
        "send what is different into the room for what came the last time",
        "csrc/pipeline/transfers.cpp",
        "!has_tags() || before.empty() || before == layout;",
        "!has_tags() || before.empty() || before != MessageLayout();",
        suites=_PIPELINE,
    ),
    Mutant(
        "compute a whole backward in the half on weights",
        "csrc/pipeline/stage.h",
        "return !gather_once_ && !units_.empty();",
        "return number_ >= 0;",
        suites=_PIPELINE,
    ),
    Mutant(
        "lose the gradients of outputs that do not lead to inputs",
        "csrc/pipeline/halves.cpp",
        "    if (paths.lead_there(roots[i])) continue;\n",
        "    if (paths.lead_there(roots[i]) || roots[i].is_valid()) continue;\n",
        suites=_PIPELINE,
    ),
    Mutant(
        "keep all of a graph until the half on weights",
        "csrc/pipeline/halves.cpp",
        "  for (const auto& node : on_the_way) node->release_variables();\n",
        "",
        suites=_PIPELINE,
    ),
    Mutant(
        "let all microbatches count alike",
        "csrc/pipeline/run.cpp",
        "static_cast<double>(targets_[i].front().size(0)) / rows;",
        "rows / (rows * static_cast<double>(count));",
        suites=_PIPELINE,
    ),
    Mutant(
        "lose the gradient of what a stage on the same rank gave",
        "csrc/pipeline/run.cpp",
        "output.detach().set_requires_grad(output.requires_grad())",
        "output.detach()",
        suites=_PIPELINE,
    ),
    Mutant(
        "sum gradients in each backward of a stage",
        "csrc/pipeline/stage.cpp",
        "    unit.set_requires_gradient_sync(is_last);\n",
        "",
        suites=_PIPELINE,
    ),
    Mutant(
        "keep full parameters of a stage from step to step",
        "csrc/pipeline/stage.cpp",
        "    if (gather_once_) unit.set_reshard_after_backward(is_last);\n",
        "",
        suites=_PIPELINE,
    ),
    Mutant(
        "tell no other rank that a stage failed",
        "csrc/pipeline/pipeline.cpp",
        '      if (!text.empty()) all += "\\n  " + text;\n',
        "      all += text.substr(text.size());\n",
        suites=_PIPELINE,
    ),
]
