"""torchtune's distributed helpers, as its recipe full_finetune_distributed calls them."""

from functools import partial

import harness
import torch
import torch.distributed as dist
from harness import LENGTH, VOCABULARY, Run, init_process_group, main
from torchtune import training
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss


def model() -> torch.nn.Module:
    return llama3_2(
        VOCABULARY, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=LENGTH, intermediate_dim=64
    )


def train(run: Run, reshard: bool = True, checkpoints: bool = False) -> None:
    init_process_group()
    whole = model().state_dict()
    with torch.device("meta"):
        sharded = model()
    if checkpoints:
        training.set_activation_checkpointing(sharded, auto_wrap_policy={type(sharded.layers[0])})
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(sharded, conditions, cpu_offload=False, reshard_after_forward=reshard)
    with torch.device("cpu"):
        for module in sharded.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    training.load_from_full_model_state_dict(sharded, whole, torch.device("cpu"), strict=True)
    training.validate_no_params_on_meta_device(sharded)
    loss_fn = CEWithChunkedOutputLoss()
    sharded.set_num_output_chunks(loss_fn.num_output_chunks)
    harness.train(run, sharded, lambda batch: loss_fn(sharded(batch), batch.roll(-1, dims=1)))
    run.take("gathered", training.gather_cpu_state_dict(sharded, is_rank_zero=dist.get_rank() == 0))


main(
    {
        "fsdp": train,
        "kept": lambda run: train(run, reshard=False),
        "checkpointed": lambda run: train(run, checkpoints=True),
    }
)
