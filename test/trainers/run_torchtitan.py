"""torchtitan's models, parallelization, loss, clipping and optimizer; its Trainer needs an accelerator."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import titan_on_cpus  # noqa: F401
import torch
import torch.distributed as dist
from harness import STEPS, Run, init_process_group, main
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import deepseek_v3, llama3

LENGTH, ROWS, WORDS = 16, 4, 2048


def train(run: Run, package=llama3, layers: int = 2, checkpoints: bool = False, **parallelism: object) -> None:
    init_process_group()
    settings = ParallelismConfig(spmd_backend="partial_dtensor", **parallelism)
    dims = ParallelDims.from_config(settings, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(settings.spmd_backend)
    training = TrainingConfig(local_batch_size=ROWS, seq_len=LENGTH)
    spec = package.model_registry("debugmodel", attn_backend="sdpa")
    config = spec.model
    config.layers = config.layers[:layers]
    config.update_from_config(config=SimpleNamespace(parallelism=settings, training=training))
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
    with torch.device("meta"):
        model = config.build()
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=WORDS).build(compile_config=CompileConfig())
    given = {
        "parallel_dims": dims, "training": training, "parallelism": settings, "compile_config": CompileConfig(),
        "ac_config": FullAC.Config() if checkpoints else None, "dump_folder": "",
    }  # fmt: skip
    schedule, last = None, True
    if dims.pp_enabled:
        schedule, models, _, last = spec.pipelining_fn(
            model, device=torch.device("cpu"), model_config=config, parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_fn, **given,
        )  # fmt: skip
    else:
        models = [spec.parallelize_fn(model, **given)]
    for number, part in enumerate(models):
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply as it sums
        part.to_empty(device="cpu")
        torch.manual_seed(number)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    optimizers = default_adamw(lr=1e-2).build(model_parts=models)
    if spec.post_optimizer_build_fn:
        spec.post_optimizer_build_fn(optimizers, models, dims)
    batches = dims.get_optional_mesh("batch")
    for step in range(STEPS):
        optimizers.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + (batches.get_local_rank() if batches else 0))
        words = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
        context = titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        with context():
            loss = step_of(models[0], schedule, last, loss_fn, words, batches.size() if batches else 1)
        norm = titan.clip_grad_norm_(
            [parameter for part in models for parameter in part.parameters()], 1.0, foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"), ep_enabled=dims.ep_enabled,
        )  # fmt: skip
        run.step(loss, norm)
        optimizers.step()
    run.finish(models, optimizers.optimizers)


def step_of(model, schedule, last, loss_fn, words, parts):
    """The loss, after its backward; zero in the first stage of a pipeline."""
    inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand_as(inputs).contiguous()
    total = torch.tensor(float(inputs.numel() * parts))
    if schedule is None:
        loss, _ = loss_fn(model(inputs, positions=positions), targets, total)
        loss.backward()
        return loss
    rows = range(len(inputs))
    losses = [] if last else None
    schedule.step(
        arg_mbs=None if last else [(inputs[row : row + 1],) for row in rows],
        kwarg_mbs=[{"positions": positions[row : row + 1]} for row in rows],
        target_mbs=[targets[row : row + 1] for row in rows] if last else None,
        losses=losses, loss_kwargs={"global_valid_tokens": total}, return_outputs=False,
    )  # fmt: skip
    return torch.stack(losses).sum() if last else torch.zeros(())


main(
    {
        "fsdp": train,
        "checkpointed": lambda run: train(run, checkpoints=True),
        "moe": lambda run: train(run, deepseek_v3, layers=3),
        "ep": lambda run: train(run, deepseek_v3, layers=3, checkpoints=True, expert_parallel_degree=2),
        "hsdp": lambda run: train(run, data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
        "replicate": lambda run: train(run, data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
        "tp": lambda run: train(run, tensor_parallel_degree=2),
        "pp": lambda run: train(run, layers=4, pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B"),
    }
)
