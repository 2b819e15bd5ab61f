"""Runs a program with an engine, and notes what a user sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from meshes import shared_mesh
from models import local
from parity import counting
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fuzz.model import Node, build_model, pack, unpack
from fuzz.program import Microbatch, Program, Step, Unit

SUMS = ("_reduce_scatter_base_", "allreduce_")


@dataclass
class Note:
    """Something that both engines must show alike.

    kind: form, sums or gathers (how many), and of values: loss, value, gradient. Those of one `moment` and kind are of
    one size: what rounds the large ones rounds small ones that were summed of large terms.
    """

    kind: str
    moment: str
    name: str
    value: torch.Tensor | str | None

    @property
    def what(self) -> str:
        return f"{self.moment}: {self.kind} {self.name}".rstrip()


def count_text(counts: dict[str, int], kinds: tuple[str, ...]) -> str:
    return ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in kinds)


def drop_full_copies(module: Any, engine: Any) -> None:
    """With those that it did not use, or that are on their way, torch would go on after an optimizer's step."""
    group = module._get_fsdp_state()._fsdp_param_group if engine.name == "torch" else None
    if group is not None:
        group.wait_for_unshard()
    module.reshard()


class Machine:
    """`pilot`: what another engine showed. Its values are taken over after each step, so that what was rounded in
    another order does not add up."""

    def __init__(self, program: Program, engine: Any, rank: int, pilot: Sequence[Note] | None = None) -> None:
        self.program, self.engine, self.rank = program, engine, rank
        self._pilot = {note.what: note.value for note in pilot or () if note.kind == "value"}
        self.notes: list[Note] = []
        self.model: Node = build_model(program.model, program.width, program.seed)
        for name in program.frozen:
            self.model.get_parameter(name).requires_grad_(False)
        for unit in program.units:
            self._wrap(unit)
        trained = list(self.model.parameters())
        self.optimizer = {
            # All at once is not for DTensors of several meshes, or beside plain parameters.
            "sgd": lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9, foreach=False),
            "adam": lambda: torch.optim.Adam(trained, lr=0.02, foreach=False),
            "adamw": lambda: torch.optim.AdamW(trained, lr=0.02, foreach=True),
        }[program.optimizer]()
        for name, parameter in self.model.named_parameters():
            placements = parameter.placements if isinstance(parameter, DTensor) else "none"
            text = f"{placements} {parameter.requires_grad} {tuple(parameter.shape)}"
            self._note("form", "wrapped", f"of {name}", text)
        for path, module in self.model.named_modules():
            self._note("form", "wrapped", f"the class of {path}", type(module).__name__)

    def run(self) -> list[Note]:
        for number, step in enumerate(self.program.steps):
            self._step(number, step)
        return self.notes

    def _note(self, kind: str, moment: str, name: str, value: torch.Tensor | str | None) -> None:
        self.notes.append(Note(kind, moment, name, value))

    # Wrapping

    def _wrap(self, unit: Unit) -> None:
        modules = [self.model.get_submodule(path) for path in unit.modules]
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**unit.policy)}
        if unit.is_offloaded:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if unit.ignored:
            options["ignored_params"] = {self.model.get_parameter(name) for name in unit.ignored}
        sizes = self.program.mesh
        names = ("replicate", "shard")[-len(sizes) :]
        if unit.api == "replicate":
            options["mesh"] = shared_mesh((self.program.world_size,), ("shard",))
            wrapped = self.engine.replicate(modules if len(modules) > 1 else modules[0], **options)
        else:
            options |= {"mesh": shared_mesh(sizes, names), "reshard_after_forward": unit.reshard_after_forward}
            if unit.is_last_dim:
                parts = sizes[-1]
                options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.shape[-1] % parts == 0 else None
            wrapped = self.engine.fully_shard(modules if len(modules) > 1 else modules[0], **options)
        assert wrapped is modules[0] or wrapped == modules

    def _unit(self, name: str) -> Any:
        return self.model.get_submodule(name)

    # Steps

    def _step(self, number: int, step: Step) -> None:
        for path, order in step.orders.items():
            self.model.get_submodule(path).order = order
        for name, flag in step.freezes.items():
            self.model.get_parameter(name).requires_grad_(flag)
        for part, microbatch in enumerate(step.microbatches):
            self._microbatch(microbatch, number, f"step {number}.{part}", 10 * number + part)
        self._note_parameters(f"step {number}", with_gradients=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step.set_to_none)
        self._note_parameters(f"after step {number}", with_gradients=False)
        self._follow()
        for unit in self.program.units:
            drop_full_copies(self._unit(unit.name), self.engine)
        if step.evaluates:
            with torch.no_grad():
                self._note("loss", f"evaluation {number}", "", self._loss("", 900 + number, False))

    def _follow(self) -> None:
        if not self._pilot:
            return
        after = len(list(self.model.parameters()))
        for note, parameter in zip(self.notes[-after:], self.model.parameters(), strict=True):
            mine, torchs = local(parameter), self._pilot[note.what]
            # Otherwise one engine shows a whole parameter and the other a piece: the comparison tells.
            if mine.shape == torchs.shape:
                mine.copy_(torchs)

    def _microbatch(self, microbatch: Microbatch, number: int, where: str, data: int) -> None:
        for name, method, arguments, options in microbatch.calls:
            if method.startswith("set_modules"):
                arguments = ([self._unit(each) for each in arguments[0]],)
            handle = getattr(self._unit(name), method)(*arguments, **options)
            if method == "unshard" and options["async_op"] and data % 2 == 0:
                handle.wait()
        forward: dict[str, int] = {}
        backward: dict[str, int] = {}
        with counting(forward, "calls"):
            losses = [
                self._loss(microbatch.module, 100 * data + each, microbatch.needs_input_grad)
                for each in range(microbatch.forwards)
            ]
        if not microbatch.module:
            self._note("gathers", where, "of forward", count_text(forward, ("_allgather_base_",)))
            self._note("sums", where, "of forward", count_text(forward, SUMS))
        for each, loss in enumerate(losses):
            self._note("loss", where, str(each), loss.detach())
        self._note_forms(f"{where} after forward")
        for name in microbatch.resharded:
            self._unit(name).reshard()
        if microbatch.resharded:
            self._note_forms(f"{where} after reshard()")
        with counting(backward, "calls"):
            total = torch.stack(losses).sum()
            if total.requires_grad:
                total.backward()
        self._note_forms(f"{where} after backward")
        # How much is gathered ahead, and in vain, is an engine's own.
        self._note("sums", where, "of backward", count_text(backward, SUMS))

    def _note_forms(self, where: str) -> None:
        """Which parameters a user finds whole, and which in pieces: with reshard_after_forward=2 those of torch are of
        two ranks between forward and backward."""
        forms = [
            f"{name} {'in pieces' if isinstance(parameter, DTensor) else 'whole'}"
            for name, parameter in self.model.named_parameters()
        ]
        self._note("form", where, "of parameters", ", ".join(forms))

    def _loss(self, module: str, data: int, needs_grad: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100_003 * self.program.seed + 1009 * self.rank + data)
        x, side = (torch.randn(3, self.program.width, generator=generator) for _ in range(2))
        x.requires_grad_(needs_grad)
        spec = next(spec for spec in self.program.model.walk() if spec.path == module)
        called = self._unit(module)
        given = {"x": x, "side": side} if spec.takes == "keywords" else None
        output = called(**given) if given else called(pack(spec.takes, x, side))
        x, side = unpack(output, side)
        return x.float().pow(2).mean() + 0.3 * side.float().mean()

    def _note_parameters(self, where: str, with_gradients: bool) -> None:
        ignored = {name for unit in self.program.units for name in unit.ignored}
        for name, parameter in self.model.named_parameters():
            self._note("value", where, f"of {name}", local(parameter).clone())
            # A parameter that is whole shows, with torch, what was not summed yet.
            if with_gradients and (isinstance(parameter, DTensor) or name in ignored):
                gradient = parameter.grad
                if isinstance(parameter, DTensor) and gradient is not None:
                    assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements, name
                    gradient = gradient.to_local()
                self._note("gradient", where, f"of {name}", None if gradient is None else gradient.detach().clone())
