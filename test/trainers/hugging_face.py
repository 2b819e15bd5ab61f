"""What the trainers of Hugging Face share: a tiny model, data, and arguments for CPUs."""

from __future__ import annotations

import tempfile
from typing import Any

from accelerate_on_cpus import take_cpus_for_gpus
from harness import BATCH, LENGTH, STEPS, VOCABULARY, Run, tokens
from transformers import LlamaConfig, LlamaForCausalLM


def llama(**options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes(), **options))


def sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Those of all steps; the trainer deals them out to the ranks."""
    return [{"input_ids": row, "labels": row} for row in tokens(0, 0, rows=2 * BATCH * STEPS)]


def arguments(kind: type, **others: Any) -> Any:
    """Those of any trainer: no files, no reports, clipping, STEPS steps."""
    given = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    made = kind(**given | others)
    take_cpus_for_gpus()  # the arguments reset what Accelerate was told before
    return made


def fsdp2_arguments(kind: type, **others: Any) -> Any:
    """The same with Accelerate's FSDP2."""
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return arguments(kind, fsdp=True, fsdp_config=layers, **others)


def train(run: Run, kind: type, *given: Any, **options: Any) -> None:
    """By this kind of trainer, with each step's loss noted."""

    class Recorded(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            run.step(loss)
            return loss

    trainer = Recorded(*given, **options)
    trainer.train()
    run.finish(trainer.model, [getattr(trainer.optimizer, "optimizer", trainer.optimizer)])
