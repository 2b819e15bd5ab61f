"""Lightning's Trainer, whose model calls fully_shard() in configure_model(), and Fabric, which is given a function."""

import torch
from harness import STEPS, Model, Run, loss_of, main, tokens
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler


def shard(model: Model, mesh: DeviceMesh, **options: object) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"], **options)
    return fully_shard(model, mesh=mesh["data_parallel"], **options)


class Task(LightningModule):
    def __init__(self, run: Run, **options: object) -> None:
        super().__init__()
        self.run, self.options, self.model = run, options, Model()

    def configure_model(self) -> None:
        shard(self.model, self.device_mesh, **self.options)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = loss_of(self.model(batch), batch)
        self.run.step(loss)
        return loss

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.model.parameters(), lr=1e-2)

    def on_before_optimizer_step(self, optimizer: AdamW) -> None:
        self.run.step(*(parameter.grad for parameter in self.model.parameters()))


def trainer(run: Run, accumulate: int = 1, **options: object) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    )  # fmt: skip
    rows = [tokens(step, 0, rows=1)[0] for step in range(4 * STEPS)]
    sampler = DistributedSampler(rows, 2, trainer.global_rank, shuffle=False)
    task = Task(run, **options)
    trainer.fit(task, DataLoader(rows, batch_size=2, sampler=sampler))
    run.finish(task, trainer.optimizers)


def fabric(run: Run, **options: object) -> None:
    strategy = FabricStrategy(
        lambda model, mesh: shard(model, mesh, **options), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        batch = tokens(step, fabric.global_rank)
        loss = loss_of(model(batch), batch)
        fabric.backward(loss)
        run.step(loss, fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model, [optimizer.optimizer])


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

main(
    {
        "trainer": trainer,
        "trainer accumulated": lambda run: trainer(run, accumulate=2),
        "fabric": fabric,
        "fabric bf16": lambda run: fabric(run, mp_policy=HALF),
    }
)
