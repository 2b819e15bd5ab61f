"""Programs from seeds. What is left out because torch's own engine fails is said where it is left out."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch

from fuzz.model import GIVEN, TAKEN, Spec
from fuzz.program import DTYPES, Microbatch, Program, Step, Unit

STEPS = 5


def program_of(seed: int, world_size: int) -> Program:
    return _Generator(seed, world_size).program()


class _Generator:
    def __init__(self, seed: int, world_size: int) -> None:
        self.seed, self.world_size = seed, world_size
        self.choose = random.Random(1000 * seed + world_size)

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def program(self) -> Program:
        self.width = self.choose.choice([3, 4, 5, 6, 8])
        self.has_policies = self.chance(0.25)
        self.has_repeats = self.chance(0.2)
        # torch does not cast the inputs of a unit when it is computed again.
        self.has_checkpoints = not self.has_policies and self.chance(0.25)
        self.forwards = 2 if self.chance(0.15) else 1
        self.has_skips = self.chance(0.2)
        self.evaluated = False
        self.mesh = self._mesh()
        # torch adds up partial sums of a unit, whichever of its parameters they are of; and it does not know the
        # dtype of the sums of a unit that has never run.
        self.has_partial_sums = len(self.mesh) == 2 and self.chance(0.4)
        self.has_optional = not self.has_partial_sums and not self.has_policies
        self.model = self._spec("", 0)
        while all(spec.kind in ("group", "plain") for spec in self.model.walk()):
            self.model = self._spec("", 0)
        self.specs = {spec.path: spec for spec in self.model.walk()}
        self.units = self._units()
        self.has_smaller_mesh = any(unit.reshard_after_forward == 2 for unit in self.units)
        is_sharded = any(unit.api == "fully_shard" for unit in self.units)
        self.has_roots = self.units[-1].api == "replicate" and is_sharded
        self._owners()
        self._dtypes_and_ties()
        self.frozen = [name for name in self._parameters() if self.chance(0.12)]
        self._ignored()
        # Sums of several reductions come in an order of the engine's own, and 16 bits make that visible. Where a tensor
        # is used three times, one of the uses outside of a unit, torch adds up its gradients in another order: what
        # registers the end of a backward gathers those of the uses inside first.
        is_loose = self.has_policies or self.has_repeats or self.forwards > 1 or self.has_skips
        is_exact = self.world_size == 2 and not is_loose
        # Adam makes a full step of a difference in the last bit of a gradient that is nearly 0.
        optimizer = self._optimizer() if is_exact else "sgd"
        steps = [self._step(number) for number in range(STEPS)]
        is_counted = (
            not self.has_repeats
            and self.forwards == 1
            and not self.has_checkpoints
            # A replicated unit of ours takes part in every backward of its tree.
            and all(unit.api == "fully_shard" for unit in self.units)
            # torch sums over a single rank too.
            and 1 not in self.mesh
            # Ours sums all units that ran, for other ranks may have used what this one has no gradient of.
            and not any(spec.optional or spec.has_spare for spec in self.model.walk())
        )
        return Program(
            self.seed,
            self.world_size,
            self.width,
            self.model,
            self.units,
            self.mesh,
            self.frozen,
            optimizer,
            steps,
            is_exact,
            sums_are_counted=is_counted,
            gathers_are_counted=is_counted and not self._gathers_in_vain(steps),
        )

    def _gathers_in_vain(self, steps: list[Step]) -> bool:
        """What torch gathers ahead in a backward that is not the last, for a module whose backward is over, waits for
        the next forward."""
        calls = [call for step in steps for microbatch in step.microbatches for call in microbatch.calls]
        return any(method == "set_is_last_backward" for _, method, _, _ in calls)

    def _optimizer(self) -> str:
        is_uniform = len({unit.api for unit in self.units}) == 1 and not any(unit.ignored for unit in self.units)
        return self.choose.choice(["sgd", "adam", "adamw" if is_uniform else "adam"])

    # The model

    def _spec(self, path: str, depth: int) -> Spec:
        forms = {"takes": self.choose.choice(TAKEN), "gives": self.choose.choice(GIVEN)}
        if depth == 0:
            forms = {"takes": "tuple", "gives": "tuple"}
        if depth > 0 and (depth == 3 or self.chance(0.55)):
            kind = self.choose.choice(["linear", "linear", "wide", "wide", "scale", "plain"])
            spec = Spec(path, kind, **forms, hidden=self.choose.randint(1, 7) if kind == "wide" else 0)
            spec.has_spare = kind != "plain" and self.chance(0.1)
            spec.skips = kind == "wide" and self.has_skips
        else:
            spec = Spec(path, "group", **forms)
            count = self.choose.randint(2, 4 if depth == 0 else 3)
            prefix = f"{path}." if path else ""
            spec.children = [self._spec(f"{prefix}c{place}", depth + 1) for place in range(count)]
            spec.order = list(range(count))
            if self.chance(0.3):
                self.choose.shuffle(spec.order)
            spec.optional = {place for place in range(count) if self.has_optional and self.chance(0.12)}
            if len(spec.optional) == count:
                spec.optional.pop()
            if self.has_repeats and self.chance(0.5):
                spec.order.insert(self.choose.randint(0, count), self.choose.randrange(count))
        spec.is_checkpointed = depth > 0 and self.has_checkpoints and spec.takes != "keywords" and self.chance(0.4)
        return spec

    def _parameters(self) -> list[str]:
        names = {"linear": ["weight", "bias"], "wide": ["weight", "bias", "back"], "scale": ["weight"]}
        return [
            f"{spec.path}.{name}"
            for spec in self.model.walk()
            for name in names.get(spec.kind, []) + (["spare"] if spec.has_spare else [])
            if not (spec.tied_to and name == "weight")
        ]

    # Units

    def _mesh(self) -> tuple[int, ...]:
        if self.world_size == 2:
            return self.choose.choice([(2,), (2,), (2,), (1, 2), (2, 1)])
        return self.choose.choice([(4,), (4,), (2, 2), (2, 2)])

    def _units(self) -> list[Unit]:
        main, other = ("replicate", "fully_shard") if self.chance(0.3) else ("fully_shard", "replicate")
        is_mixed = self.chance(0.25)
        modules: list[list[str]] = []
        for spec in self.model.walk():
            if spec.path and self.chance(0.45):
                modules.append([spec.path])
        modules = self._with_lists(modules)
        # Inner modules first, as both functions want it.
        modules.sort(key=lambda paths: -paths[0].count("."))
        modules.append([""])
        self.is_offloaded = self.chance(0.08)
        apis = [other if is_mixed and self.chance(0.4) else main for _ in modules]
        return [self._unit(self._api(apis, place, modules), paths) for place, paths in enumerate(modules)]

    def _api(self, apis: list[str], place: int, modules: list[list[str]]) -> str:
        """Under a replicated model, the outermost sharded units are roots of their own in torch: a root cannot be a
        list, and it begins with the replicated units in it, which are then refused to the model."""
        if apis[-1] == "fully_shard":
            return apis[place]
        path = modules[place][0]
        outer = [each for each, paths in enumerate(modules) if any(path.startswith(f"{one}.") for one in paths if one)]
        if any(self._api(apis, each, modules) == "fully_shard" for each in outer):
            return "fully_shard"
        return apis[place] if len(modules[place]) == 1 else "replicate"

    def _with_lists(self, modules: list[list[str]]) -> list[list[str]]:
        """Siblings that each run once in every forward: if one stays away, torch warns and does not train them well."""
        for spec in self.model.walk():
            if spec.kind != "group" or self._runs_seldom_or_often(spec.path) or not self.chance(0.35):
                continue
            places = [p for p in range(len(spec.children)) if p not in spec.optional and spec.order.count(p) == 1]
            # A list is gathered when its first member begins; torch has no such moment when it computes again.
            places = [p for p in places if not self._in_checkpoint(spec.children[p].path)]
            if len(places) >= 2:
                paths = [spec.children[place].path for place in self.choose.sample(places, 2)]
                modules = [each for each in modules if each[0] not in paths] + [paths]
        return modules

    def _ancestors(self, path: str) -> list[Spec]:
        parts = path.split(".") if path else []
        return [self.specs[".".join(parts[:end])] for end in range(len(parts))]

    def _runs_seldom_or_often(self, path: str) -> bool:
        for parent, child in pairwise([*self._ancestors(path), self.specs[path]]):
            place = parent.children.index(child)
            if place in parent.optional or parent.order.count(place) != 1:
                return True
        return False

    def _in_checkpoint(self, path: str) -> bool:
        return any(spec.is_checkpointed for spec in [*self._ancestors(path), self.specs[path]])

    def _unit(self, api: str, modules: list[str]) -> Unit:
        unit = Unit(api, modules, is_offloaded=self.is_offloaded)
        if api == "fully_shard":
            unit.reshard_after_forward = self.choose.choice([None, None, True, False])
            unit.is_last_dim = self.chance(0.15)
            if self.mesh == (4,) and not unit.is_last_dim and self.chance(0.25):
                # With Shard(1) torch cuts the part that stays along dimension 0.
                unit.reshard_after_forward = 2
        if self.has_policies:
            unit.policy = {
                "param_dtype": self.choose.choice([torch.bfloat16, torch.bfloat16, None]),
                "reduce_dtype": self.choose.choice([None, torch.float32, torch.bfloat16]),
                "output_dtype": self.choose.choice([None, None, torch.float32]),
                "cast_forward_inputs": self.chance(0.7),
            }
            if len(modules) > 1:
                # torch casts what the first module of a list is given, and what the last one gives.
                unit.policy |= {"output_dtype": None, "cast_forward_inputs": False}
        return unit

    def _owners(self) -> None:
        """The unit that has each module."""
        self.owners: dict[str, Unit] = {}
        for unit in self.units:
            for path in unit.modules:
                for spec in self.specs[path].walk():
                    self.owners.setdefault(spec.path, unit)

    def _dtypes_and_ties(self) -> None:
        for unit in self.units:
            # torch wants one dtype in a unit.
            dtype = self.choose.choice(DTYPES) if self.chance(0.2) else torch.float32
            leaves = [spec for spec in self.model.walk() if self.owners[spec.path] is unit and spec.kind != "group"]
            for spec in leaves:
                spec.dtype = dtype
            for kind in ("linear", "scale"):
                same = [spec for spec in leaves if spec.kind == kind]
                # torch 2.11 trains a parameter of two units apart, and says nothing.
                if len(same) >= 2 and self.chance(0.4):
                    same[1].tied_to = same[0].path

    def _ignored(self) -> None:
        for unit in self.units:
            own = [name for name in self._parameters() if self.owners[name.rpartition(".")[0]] is unit]
            tied = {f"{spec.tied_to}.weight" for spec in self.model.walk()}
            if not self.has_policies and self.chance(0.08):
                unit.ignored = [name for name in own if name not in tied and self.chance(0.3)]

    # Steps

    def _step(self, number: int) -> Step:
        orders = {
            spec.path: [p for p in spec.order if p not in spec.optional or self.chance(0.6)]
            for spec in self.model.walk()
            if spec.optional
        }
        count = self.choose.choice([1, 1, 2, 3])
        microbatches = [self._microbatch(part, count, number) for part in range(count)]
        alone = [unit.name for unit in self.units if len(unit.modules) == 1 and unit.name]
        if number and count == 1 and alone and not self.has_partial_sums and self.chance(0.15):
            microbatches.append(Microbatch(module=self.choose.choice(alone)))
        # A unit all of whose parameters are frozen at the start knows no dtype for its sums in torch.
        can_freeze = not self.has_policies and not self.has_partial_sums
        # What an evaluation left whole is frozen and unfrozen as it is. Where a module runs twice, torch gathers it in
        # the middle of a backward anew, with the flags that its shards still have: gradients are lost. Of what it left
        # on a smaller mesh torch shows parameters whose flags come to nothing.
        can_freeze &= not self.evaluated or (self.forwards == 1 and not self.has_repeats and not self.has_smaller_mesh)
        # A sharded root of a replicated model that an evaluation left whole and that then does not run stays whole in
        # torch.
        can_evaluate = not self.has_roots or not orders
        self.evaluated = self.chance(0.2) and can_evaluate
        freezes = {name: self.chance(0.7) for name in self._parameters() if can_freeze and self.chance(0.05)}
        return Step(orders, microbatches, freezes, self.chance(0.6), self.evaluated)

    def _microbatch(self, part: int, count: int, step: int) -> Microbatch:
        is_last = part == count - 1
        made = Microbatch(forwards=self.forwards, needs_input_grad=self.chance(0.3))
        calls = made.calls
        if count > 1:
            calls.append(("", "set_requires_gradient_sync", (is_last,), {}))
            if part == 0:
                self.late = self.chance(0.5), self.chance(0.5)
            # Parameters that stay whole over the optimizer's step are old ones afterwards: the last one reshards.
            if self.late[0]:
                calls.append(("", "set_is_last_backward", (is_last,), {}))
            if self.late[1]:
                calls.append(("", "set_reshard_after_backward", (is_last,), {}))
        elif self.has_partial_sums:
            calls.append(("", "set_requires_all_reduce", (self.chance(0.6),), {}))
        self._calls_of_units(calls, count)
        made.resharded = [unit.name for unit in self.units if self.chance(0.1)]
        return made

    def _calls_of_units(self, calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]], count: int) -> None:
        has_replicate = any(unit.api == "replicate" for unit in self.units)
        if self.chance(0.1) and not has_replicate and not self.has_smaller_mesh:
            # torch fails on a replicated module; and one that an evaluation left on the smaller mesh it gathers from
            # the whole one then.
            calls.append(("", "set_reshard_after_forward", (self.chance(0.5),), {"recurse": self.chance(0.5)}))
        for unit in self.units:
            if count == 1 and not self.has_partial_sums and self.chance(0.06):
                calls.append((unit.name, "set_requires_gradient_sync", (self.chance(0.6),), {"recurse": False}))
            # The end of a backward of the model leaves sharded roots in it alone in torch, if they were brought by hand
            # and did not run.
            if self.chance(0.12) and not (self.has_roots and unit.api == "fully_shard"):
                calls.append((unit.name, "unshard", (), {"async_op": self.chance(0.5)}))
            # In torch a gather that is under way from a smaller mesh is taken for one of the whole mesh after a
            # reshard; and the sharded units of a replicated model are roots, which have no streams until they run.
            if self.chance(0.08) and not self.has_smaller_mesh and not self.has_roots:
                which = self.choose.choice(["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
                targets = self.choose.sample(self.units, min(len(self.units), self.choose.randint(0, 2)))
                calls.append((unit.name, which, ([one.name for one in targets],), {}))
