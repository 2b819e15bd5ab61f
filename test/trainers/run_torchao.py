"""torchao's tensors and layers with fully_shard(): int8 and float8 parameters gather themselves."""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from harness import Model, Run, init_process_group, loss_of, main
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.prototype.quantized_training import (
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_

FULL = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(
    run: Run, change: Callable[[nn.Module], object], after: Callable[[nn.Module], object] = lambda model: None,
    policy: MixedPrecisionPolicy = FULL,
) -> None:  # fmt: skip
    init_process_group()
    model = Model()
    change(model.blocks)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # int8 parameters have no mul_(), which a decay needs.
    harness.train(run, model, lambda batch: loss_of(model(batch).float(), batch), None, after, weight_decay=0)


def float8(model: nn.Module) -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)


main(
    {
        "int8 weights": lambda run: train(run, lambda model: quantize_(model, int8_weight_only_quantized_training())),
        "int8 products": lambda run: train(run, lambda model: quantize_(model, int8_mixed_precision_training())),
        "float8": lambda run: train(run, float8, policy=HALF),
        "float8 precomputed": lambda run: train(run, float8, precompute_float8_dynamic_scale_for_fsdp, HALF),
    }
)
