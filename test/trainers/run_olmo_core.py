"""OLMo-core's transformer, with its own parallelization."""

import torch
import torch.distributed as dist
from harness import LENGTH, STEPS, VOCABULARY, Run, init_process_group, main, tokens
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = tokens(step, dist.get_rank())
        loss = model(batch, labels=batch.roll(-1, dims=1)).loss
        loss.backward()
        run.step(loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model, [optimizer])


main(
    {
        "fsdp": train,
        "fsdp bf16": lambda run: train(run, param_dtype=DType.bfloat16),
        "fsdp prefetching": lambda run: train(run, prefetch_factor=1),
        "hsdp": lambda run: train(run, name=DataParallelType.hsdp, num_replicas=2),
    }
)
