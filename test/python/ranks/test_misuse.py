"""Wrong use is told, by the same exceptions as torch's where torch tells it, and leaves modules as they were."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import local
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
ONCE = "Each distinct composable distributed API can only be applied to a module once"
CONTAINER = "does not support containers that do not implement forward"
ON_META = "FSDP parameters should be materialized from meta device before training"
RESHARD = "reshard_after_forward should be a bool or an int representing the group size to reshard to, not yes"
COPY = "FSDP does not support deepcopy. Please use state dict for serialization."

Error = tuple[type[BaseException], str]


class Watch:
    """Notes modules as they are; told once more, the last note counts."""

    def __init__(self) -> None:
        self._notes: dict[nn.Module, dict[str, Any]] = {}

    def __call__(self, module: Any) -> Any:
        self._notes[module] = _note(module)
        return module

    def changes(self) -> list[str]:
        return [
            f"{what} was {then[what]} and is {now.get(what)}"
            for module, then in self._notes.items()
            for now in [_note(module)]
            for what in then
            if now.get(what) != then[what]
        ]


def _note(module: nn.Module) -> dict[str, Any]:
    note: dict[str, Any] = {}
    for name, one in module.named_modules():
        note[f"class and hooks of '{name}'"] = (type(one), len(one._forward_pre_hooks), len(one._forward_hooks))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        mine = local(parameter)
        values = None if mine.is_meta else mine.flatten().tolist()
        note[f"parameter {name}"] = (id(parameter), type(parameter), parameter.requires_grad, values)
    return note


@dataclass(frozen=True)
class Case:
    """What is done to an engine, and the exception of exactly this type whose text has this fragment."""

    kind: type[BaseException]
    fragment: str
    do: Callable[[Any, Watch], Any]
    ranks: int = 1
    #: torch raises nothing (True) or this, which helps nobody.
    ours_only: Error | bool = False
    #: torch leaves the modules half changed, ours does not.
    torch_keeps: bool = True

    def wanted(self, is_torch: bool) -> Error | None:
        if is_torch and self.ours_only:
            return None if self.ours_only is True else self.ours_only
        return self.kind, self.fragment

    def problems(self, engine: Engine) -> list[str]:
        watch, is_torch = Watch(), engine.name == "torch"
        seen: BaseException | None = None
        try:
            self.do(engine, watch)
        except Exception as error:
            seen = error
        wanted = self.wanted(is_torch)
        if wanted is None:
            return [f"raised {seen!r}"] if seen else []
        is_told = isinstance(seen, wanted[0]) and wanted[1] in str(seen)
        found = [] if is_told else [f"raised {type(seen).__name__}: {seen}, for {wanted}"]
        return found + (watch.changes() if self.torch_keeps or not is_torch else [])


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3)


def with_inner(engine: Engine, number: int) -> nn.Sequential:
    model = layers()
    engine.fully_shard(model[number])
    return model


def mesh(*sizes: int, names: str = "abcd") -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names[: len(sizes)]))


def wraps(function: str = "fully_shard", **options: Any) -> Callable[[Engine, Watch], Any]:
    """A call on two layers. Of a mesh these are the sizes."""

    def do(engine: Engine, watch: Watch) -> None:
        given = {name: mesh(*one) if isinstance(one, tuple) else one for name, one in options.items()}
        getattr(engine, function)(watch(layers()), **given)

    return do


def calls(method: str, *args: Any, function: str = "fully_shard") -> Callable[[Engine, Watch], Any]:
    """A method of two layers that were wrapped."""
    return lambda engine, watch: getattr(watch(getattr(engine, function)(layers())), method)(*args)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))


def table_of_norm(engine: Engine, watch: Watch) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*max_norm")
        engine.fully_shard(watch(nn.Embedding(4, 3, max_norm=1)))


def ignored_in_a_list(engine: Engine, watch: Watch) -> None:
    model = watch(layers())
    engine.fully_shard(model, ignored_params=[model[0].weight])


def transposed(engine: Engine, watch: Watch) -> None:
    model = layers()
    model[1].weight = nn.Parameter(torch.ones(4, 2).t())
    engine.fully_shard(watch(model))


def three_axes_of_tensor_parallelism(engine: Engine, watch: Watch) -> None:
    model, axes = layers(), mesh(1, 1, 1, 1)
    placements = [Shard(0), Replicate(), Replicate()]
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), axes["b", "c", "d"], placements))
    engine.fully_shard(watch(model), mesh=axes["a"])


def prefetch(engine: Engine, watch: Watch) -> None:
    model = with_inner(engine, 0)
    watch(engine.fully_shard(model)).set_modules_to_forward_prefetch([*model])


def stream_without_a_hook(engine: Engine, watch: Watch) -> None:
    model = engine.fully_shard(layers())
    model.set_all_reduce_hook(None, stream=torch.cpu.current_stream())
    model(data()).sum().backward()


class Gather(AllGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def memory_of_the_group(engine: Engine, watch: Watch, method: str, comm: Any) -> None:
    model = watch(engine.fully_shard(layers()))
    getattr(model, method)(comm)
    model.set_allocate_memory_from_process_group_for_comm(True)


def symmetric_memory(engine: Engine, watch: Watch) -> None:
    model = watch(engine.fully_shard(layers()))
    model.set_custom_all_gather(Gather())
    model.set_symm_mem_for_comm()


def list_as_root(engine: Engine, watch: Watch, function: str) -> None:
    model = layers()
    getattr(engine, function)(list(model))
    watch(model)(data())


def child_before_its_root(engine: Engine, watch: Watch, function: str) -> None:
    model = layers()
    for module in (model[0], model):
        getattr(engine, function)(module)
    watch(model)[0](data())
    watch(model)(data())


def on_meta(engine: Engine, watch: Watch, unshards: bool = False) -> None:
    with torch.device("meta"):
        model = layers()
    watch(engine.fully_shard(model))
    model.unshard() if unshards else model(data())


SHARD_COLUMNS = {"shard_placement_fn": lambda p: Shard(1) if p.shape == (4, 3) else None}

#: With the engine `e` and the watch `w`.
CASES = [
    # Modules that were wrapped, and those that cannot be.
    Case(AssertionError, f"{ONCE}. fully_shard has", lambda e, w: e.fully_shard(w(e.fully_shard(layers())))),
    Case(AssertionError, f"{ONCE}. replicate has", lambda e, w: e.replicate(w(e.replicate(layers())))),
    Case(AssertionError, ONCE, lambda e, w: e.fully_shard([*w(with_inner(e, 1))])),
    Case(
        RuntimeError,
        "Cannot apply `replicate()` on a Module already managed by `fully_shard`",
        lambda e, w: e.replicate(w(e.fully_shard(layers()))),
    ),
    Case(
        RuntimeError,
        "already managed by `fully_shard`",
        lambda e, w: e.replicate([*w(with_inner(e, 1))]),
        ours_only=(AssertionError, "more than once."),
    ),
    Case(
        AssertionError,
        "already managed by `replicate`",
        lambda e, w: e.fully_shard(w(e.replicate(layers()))),
        ours_only=(AssertionError, "more than once."),
    ),
    Case(ValueError, f"fully_shard {CONTAINER}", lambda e, w: e.fully_shard(w(nn.ModuleList(layers())))),
    Case(ValueError, f"replicate {CONTAINER}", lambda e, w: e.replicate(w(nn.ModuleDict({"a": nn.Linear(2, 2)})))),
    Case(
        ValueError,
        "got an empty list",
        lambda e, w: e.fully_shard([]),
        ours_only=(IndexError, "tuple index out of range"),
    ),
    Case(TypeError, "nn.Module", lambda e, w: e.fully_shard(42), ours_only=(TypeError, "'int' object is not iterable")),
    # Meshes
    Case(ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got", wraps(mesh=(1, 1, 1))),
    Case(
        AssertionError,
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        lambda e, w: e.fully_shard(w(layers()), mesh=init_device_mesh("cpu", (1, 1))),
    ),
    Case(ValueError, "replicate expects a 1D DeviceMesh but got", wraps("replicate", mesh=(1, 1))),
    Case(
        TypeError, "DeviceMesh", wraps(mesh="cpu"), ours_only=(AttributeError, "'str' object has no attribute 'ndim'")
    ),
    # Arguments
    Case(ValueError, RESHARD, wraps(reshard_after_forward="yes")),
    Case(ValueError, "it should be a factor of 1, not 0", wraps(reshard_after_forward=0)),
    Case(ValueError, "it should be a factor of 2, not 3", wraps(reshard_after_forward=3), ranks=2),
    Case(ValueError, "it should be a factor of 1, not 2", wraps(mesh=(2, 1), reshard_after_forward=2), ranks=2),
    Case(
        TypeError,
        "mp_policy",
        wraps(mp_policy=torch.bfloat16),
        ours_only=(TypeError, "replace() should be called on") if VERSION >= (2, 15) else True,
    ),
    Case(
        TypeError,
        "reduce_dtype of mp_policy must be a torch.dtype, not 'float32'",
        wraps(mp_policy=MixedPrecisionPolicy(reduce_dtype="float32")),  # type: ignore[arg-type]
        ours_only=True,
    ),
    Case(TypeError, "offload_policy", wraps(offload_policy=True), ours_only=True),
    Case(TypeError, "ignored_params", ignored_in_a_list, ours_only=(RuntimeError, "The size of tensor a")),
    # Parameters
    Case(
        ValueError,
        "doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.",
        lambda e, w: e.fully_shard(w(Scaled())),
    ),
    Case(
        ValueError,
        "'weight' belongs to a layer with max_norm",
        lambda e, w: e.replicate(w(nn.Embedding(4, 3, max_norm=1))),
        ranks=2,
        ours_only=True,
    ),
    Case(UserWarning, "'weight' belongs to a layer with max_norm", table_of_norm, ranks=2, ours_only=True),
    # torch has sharded the layer before it by then.
    Case(NotImplementedError, "FSDP does not support non-contiguous parameters yet", transposed, torch_keeps=False),
    Case(
        NotImplementedError,
        "FSDP does not support uneven sharding on dim 1",
        wraps(**SHARD_COLUMNS),
        ranks=2,
        torch_keeps=False,
    ),
    Case(
        AssertionError,
        "Shard dim 1 is invalid for 1D tensor",
        wraps(shard_placement_fn=lambda p: Shard(1)),
        torch_keeps=False,
    ),
    Case(
        ValueError,
        "Invalid shard_placement_fn result",
        wraps(shard_placement_fn=lambda p: Replicate()),
        ours_only=False if VERSION >= (2, 15) else (AttributeError, "object has no attribute 'dim'"),
        torch_keeps=False,
    ),
    Case(
        NotImplementedError,
        "FSDP only supports 1D TP/EP or 2D EP+TP, not",
        three_axes_of_tensor_parallelism,
        torch_keeps=False,
    ),
    # Methods
    Case(AssertionError, COPY, lambda e, w: copy.deepcopy(w(e.replicate(layers())))),
    Case(AssertionError, COPY, lambda e, w: copy.deepcopy(w(with_inner(e, 1)))),
    Case(
        ValueError, "reshard_after_forward should be a bool, got <class 'int'>", calls("set_reshard_after_forward", 1)
    ),
    # torch has an assertion without a text there.
    Case(
        AssertionError,
        "replicate",
        calls("set_reshard_after_forward", True, function="replicate"),
        ours_only=(AssertionError, ""),
    ),
    Case(
        ValueError,
        "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>",
        prefetch,
    ),
    Case(
        ValueError,
        "stream cannot be set when using native HSDP",
        lambda e, w: w(e.fully_shard(layers(), mesh=mesh(1, 1))).set_all_reduce_hook(
            print, stream=torch.cpu.current_stream()
        ),
    ),
    Case(AssertionError, "all reduce hook stream is specified but hook itself is missing.", stream_without_a_hook),
    Case(
        AssertionError,
        "when all gather comm is custom: Gather",
        lambda e, w: memory_of_the_group(e, w, "set_custom_all_gather", Gather()),
    ),
    Case(
        AssertionError,
        "when reduce scatter comm is custom: Scatter",
        lambda e, w: memory_of_the_group(e, w, "set_custom_reduce_scatter", Scatter()),
    ),
    Case(AssertionError, "when all gather comm is custom: Gather", symmetric_memory),
    Case(ValueError, "divide factor", calls("set_gradient_divide_factor", 0.0), ours_only=True),
    Case(
        ValueError,
        "does not have a method forward_features",
        lambda e, w: e.register_fsdp_forward_method(w(e.fully_shard(layers())), "forward_features"),
    ),
    Case(
        ValueError,
        "Expects list of FSDPModules but got Linear",
        lambda e, w: e.share_comm_ctx([w(e.fully_shard(layers())), w(nn.Linear(2, 2))]),
    ),
    # Runs
    Case(RuntimeError, "FSDP requires a single root module but got", lambda e, w: list_as_root(e, w, "fully_shard")),
    Case(RuntimeError, "Replicate requires a single root module but got", lambda e, w: list_as_root(e, w, "replicate")),
    Case(
        RuntimeError,
        "FSDP state has already been lazily initialized for 0",
        lambda e, w: child_before_its_root(e, w, "fully_shard"),
    ),
    Case(
        RuntimeError,
        "requires running forward through the root module first",
        lambda e, w: child_before_its_root(e, w, "replicate"),
    ),
    Case(
        RuntimeError,
        f"{ON_META}, but the following were still on meta device: ['0.weight', '0.bias', '1.weight', '1.b",
        on_meta,
    ),
    Case(RuntimeError, ON_META, lambda e, w: on_meta(e, w, unshards=True)),
    Case(RuntimeError, "got mixed torch.Tensor and DTensor", lambda e, w: w(e.fully_shard(layers()))[0](data())),
    Case(RuntimeError, "got mixed torch.Tensor and DTensor", calls("load_state_dict", layers().state_dict())),
]


def problems_of(rank: int) -> list[str]:
    """Of torch too: what the table says of it must be true."""
    return [
        f"{engine.name}, rank {rank}, {case.fragment}: {problem}"
        for engine in ([TORCH] if ours() is TORCH else [TORCH, ours()])
        for case in CASES
        if case.ranks == dist.get_world_size()
        for problem in case.problems(engine)
    ]


def right_call_after_a_wrong_one(rank: int) -> None:
    """torch keeps the mark of the call that failed, and says that the module is wrapped already."""
    for wrap in (ours().fully_shard, ours().replicate):
        model, reference = layers(), layers()
        model[1].weight = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match="scalar"):
            wrap(model)
        model[1].weight = nn.Parameter(reference[1].weight.detach().clone())
        wrap(model)
        torch.testing.assert_close(model(data()), reference(data()))


def without_a_process_group(rank: int) -> None:
    for wrap in (ours().fully_shard, ours().replicate):
        with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected, but not set"):
            wrap(layers())


class TestMisuse:
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_is_told(self, world_size: int) -> None:
        problems = [problem for found in run_ranks(world_size, problems_of) for problem in found]
        assert not problems, "\n".join(problems)

    test_a_right_call_after_a_wrong_one = on_ranks(1, right_call_after_a_wrong_one)
    test_without_a_process_group = on_ranks(1, without_a_process_group, backend=None, environment={"MASTER_ADDR": ""})
