"""OLMo-core's transformer, with its own parallelization."""

import harness
import torch
from harness import LENGTH, VOCABULARY, Run, init_process_group, main
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from olmo_core.train.train_module.transformer.common import parallelize_model


def train(run: Run, **options: object) -> None:
    init_process_group()
    data = TransformerDataParallelConfig(**{"name": DataParallelType.fsdp} | options)
    config = TransformerConfig.llama_like(d_model=32, vocab_size=VOCABULARY, n_layers=3, n_heads=4)
    model = parallelize_model(
        config.build(init_device="meta"), world_mesh=build_world_mesh(dp=data, device_type="cpu"),
        device=torch.device("cpu"), max_sequence_length=LENGTH, rank_microbatch_size=2 * LENGTH, dp_config=data,
    )  # fmt: skip
    harness.train(run, model, lambda batch: model(batch, labels=batch.roll(-1, dims=1)).loss)


main(
    {
        "fsdp": train,
        "fsdp bf16": lambda run: train(run, param_dtype=DType.bfloat16),
        "fsdp prefetching": lambda run: train(run, prefetch_factor=1),
        "hsdp": lambda run: train(run, name=DataParallelType.hsdp, num_replicas=2),
    }
)
