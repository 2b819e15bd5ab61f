"""transformers' Trainer: with Accelerate's FSDP2, and with models that transformers shards itself as it loads them."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from harness import Run, init_process_group, main
from hugging_face import arguments, fsdp2_arguments, llama, rows, sizes, train
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


def with_plugin(run: Run, tied: bool = False, **others: object) -> None:
    given = fsdp2_arguments(TrainingArguments, **others)
    train(run, Trainer, llama(tie_word_embeddings=tied), given, train_dataset=rows())


def sharded_at_load(run: Run, model: torch.nn.Module, **sizes: object) -> None:
    """The model goes through a checkpoint that rank 0 writes."""
    init_process_group()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    loaded = type(model).from_pretrained(folder[0], distributed_config=DistributedConfig(**sizes))
    train(run, Trainer, loaded, arguments(TrainingArguments), train_dataset=rows())


def experts() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**sizes(), num_local_experts=4))


main(
    {
        "plugin": with_plugin,
        "plugin tied": lambda run: with_plugin(run, tied=True),
        "plugin accumulated": lambda run: with_plugin(run, gradient_accumulation_steps=2, gradient_checkpointing=True),
        "own fsdp": lambda run: sharded_at_load(run, llama(), fsdp_size=2),
        "own fsdp bf16": lambda run: sharded_at_load(run, llama(), fsdp_size=2, fsdp_mixed_precision=True),
        "own hsdp": lambda run: sharded_at_load(run, llama(), fsdp_size=2, dp_replicate_size=2),
        "own fsdp and tp": lambda run: sharded_at_load(run, llama(), fsdp_size=2, tp_size=2),
        "own fsdp and ep": lambda run: sharded_at_load(run, experts(), fsdp_size=2, ep_size=2),
    }
)
