"""Ray Train's TorchTrainer. It starts ranks of its own, so of those that torchrun started only the first uses it."""

import os
import sys
import tempfile

import ray
import torch
from harness import Model, Run, loss_of, train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.fsdp import fully_shard


def loop(settings: dict[str, str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run, model = Run(), Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(run, model, lambda batch: loss_of(model(batch), batch), clip=None)
    run.write(settings["out"])


if os.environ["RANK"] == "0":
    out, case = sys.argv[1:]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # Ray's ranks meet at a store of their own
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        loop, train_loop_config={"out": f"{out}.{case}"}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )  # fmt: skip
    trainer.fit()
