"""What the programs of this folder share: a model, data, and what a run leaves to be compared. It names no engine."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

STEPS = 4
VOCABULARY = 64
LENGTH = 16
BATCH = 2


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts each token from the one before; small, but with a unit for each block and some for the root."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(step: int, rank: int, rows: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    """A batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """That of predicting each token from those before."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def train(
    run: Run,
    model: nn.Module,
    loss_in: Callable[[torch.Tensor], torch.Tensor],
    clip: Callable[..., torch.Tensor] | None = nn.utils.clip_grad_norm_,
    after: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> None:
    """Trains with AdamW. `loss_in`: of a batch; `clip` as torch's, or nothing; `after` each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(STEPS):
        loss = loss_in(tokens(step, dist.get_rank()))
        loss.backward()
        run.step(loss, *([clip(model.parameters(), max_norm=0.5)] if clip else []))
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    run.finish(model, [optimizer])


def full(value: Any) -> torch.Tensor:
    """The whole of it, in memory of its own. Collective."""
    tensor = torch.as_tensor(value).detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().clone()


def init_process_group() -> None:
    """For two ranks Gloo, for more shardwise's transport with both engines: Gloo adds in an order of its own then."""
    two = int(os.environ["WORLD_SIZE"]) == 2
    if not two:
        importlib.import_module("shardwise")
    dist.init_process_group("gloo" if two else "shardwise")


class Run:
    """What a run leaves: each step's values (losses, norms), all tensors whole, and the engine that it had."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.engines: set[str] = set()

    def step(self, *values: Any) -> None:
        self.steps += [full(value) for value in values]

    def finish(self, models: nn.Module | Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Takes the parameters, buffers and optimizers' states at the end of a run. Collective."""
        for number, model in enumerate([models] if isinstance(models, nn.Module) else models):
            named = [*model.named_parameters(), *model.named_buffers()]
            self.take(f"model {number}", dict(named))
            wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
            self.engines |= {_engine_of(module) for module in wrapped}
            assert wrapped, "no module is wrapped by fully_shard() or replicate()"
        for number, optimizer in enumerate(optimizers):
            for index, state in enumerate(optimizer.state.values()):
                self.take(f"optimizer {number}.{index}", state)

    def take(self, prefix: str, named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            if is_traceable_wrapper_subclass(local):  # it holds other tensors: those of this rank's shard
                self.take(f"{prefix}.{name}", {inner: getattr(local, inner) for inner in local.__tensor_flatten__()[0]})
            elif value is not None:
                self.tensors[f"{prefix}.{name}"] = full(value)

    def write(self, out: str) -> None:
        what = {"steps": self.steps, "tensors": self.tensors, "engines": sorted(self.engines)}
        torch.save(what, f"{out}.{dist.get_rank()}")


def _engine_of(module: nn.Module) -> str:
    """The package that the class of a wrapped module comes from; each engine puts one of its own before torch's."""
    return "shardwise" if any(kind.__module__.startswith("shardwise") for kind in type(module).__mro__) else "torch"


def main(cases: Mapping[str, Callable[[Run], None]]) -> None:
    """Runs cases: OUT CASE ... Each rank writes what a case left to the file OUT.CASE.RANK.

    Trainers keep state in their modules, so each case has a process of its own, forked when all is imported.
    """
    out, *names = sys.argv[1:]
    failed = [name for number, name in enumerate(names) if not _forked(number, f"{out}.{name}", cases[name])]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _forked(number: int, out: str, case: Callable[[Run], None]) -> bool:
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        _take_store(f"port {number}")
        _run(out, case)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _take_store(key: str) -> None:
    """Makes this process meet the others at a store of its own, for torchrun's has what the case before left there."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store.set(key, str(free.getsockname()[1]))
    os.environ |= {"MASTER_PORT": store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _run(out: str, case: Callable[[Run], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run()
    case(run)
    run.write(out)
    dist.barrier()
    dist.destroy_process_group()
