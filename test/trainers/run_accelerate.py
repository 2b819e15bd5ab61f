"""A loop with Accelerate and its FSDP2 plugin."""

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate_on_cpus import take_cpus_for_gpus
from harness import STEPS, Model, Run, loss_of, main, tokens
from torch.optim import AdamW


def train(run: Run, accumulate: int = 1, precision: str = "no", **options: object) -> None:
    take_cpus_for_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate, mixed_precision=precision
    )
    model = Model()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS * accumulate):
        with accelerator.accumulate(model):
            batch = tokens(step, accelerator.process_index)
            loss = loss_of(model(batch), batch)
            accelerator.backward(loss)
            run.step(loss)
            if accelerator.sync_gradients:
                run.step(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
    run.finish(model, [optimizer.optimizer])


main(
    {
        "fsdp2": train,
        "fsdp2 bf16": lambda run: train(run, precision="bf16", reshard_after_forward=False),
        "fsdp2 accumulated": lambda run: train(run, accumulate=2),
        "fsdp2 checkpointed": lambda run: train(run, activation_checkpointing=True),
        "fsdp2 from rank 0": lambda run: train(run, cpu_ram_efficient_loading=True),
    }
)
