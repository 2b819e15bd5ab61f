"""Tensor and pipeline parallelism for C++ modules: cpp.parallelize(), cpp.Pipeline and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _C
from shardwise._C import Split, TensorParallel
from shardwise._cpp_modules import inner
from shardwise._cpp_wrapping import cpp_mesh

#: torch's names of schedules.
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

AnyMesh = DeviceMesh | ProcessGroup | _C.Mesh
Tensors = torch.Tensor | Sequence[torch.Tensor]


def colwise(
    *,
    gather_output: bool = False,
    segments: int = 1,
    heads: int | None = None,
    sequence_dim: int | None = None,
    transposed: bool = False,
) -> Split:
    """Each rank computes some outputs of a layer.

    Args:
        gather_output: all ranks get all outputs; otherwise each rank has those of its piece, for rowwise().
        segments: the weight consists of this many layers of equal size, such as queries, keys and values.
        heads: the outputs belong to this many heads, and each rank has whole heads.
        sequence_dim: each rank's input is its part of the activations along this dimension.
        transposed: the weight is [inputs, outputs] and not [outputs, inputs].

    >>> shardwise.cpp.parallelize(model, mesh["tp"], {"blocks.*.up": shardwise.cpp.colwise()})
    """
    return Split(
        kind="colwise",
        gather_output=gather_output, segments=segments, heads=heads, sequence_dim=sequence_dim, transposed=transposed,
    )  # fmt: skip


def rowwise(
    *,
    split_input: bool = False,
    segments: int = 1,
    heads: int | None = None,
    sequence_dim: int | None = None,
    transposed: bool = False,
) -> Split:
    """Each rank takes some inputs of a layer, and the results are added up over the ranks.

    The inputs are what colwise() left, or with `split_input` this rank's piece of a whole input. The other arguments
    are those of colwise().

    >>> shardwise.cpp.parallelize(model, mesh["tp"], {"blocks.*.down": shardwise.cpp.rowwise()})
    """
    return Split(
        kind="rowwise",
        split_input=split_input, segments=segments, heads=heads, sequence_dim=sequence_dim, transposed=transposed,
    )  # fmt: skip


def vocabulary(*, sequence_dim: int | None = None) -> Split:
    """Each rank has some entries of an Embedding's table.

    >>> shardwise.cpp.parallelize(model, mesh["tp"], {"embedding": shardwise.cpp.vocabulary()})
    """
    return Split(kind="vocabulary", sequence_dim=sequence_dim)


def sequence() -> Split:
    """Each rank uses the whole parameters on its part of the activations; their gradients are added up.

    >>> shardwise.cpp.parallelize(model, mesh["tp"], {"blocks.*.norm": shardwise.cpp.sequence()})
    """
    return Split(kind="sequence")


def parallelize(
    module: Any,
    mesh: AnyMesh,
    plan: Mapping[str, Split],
    *,
    axis: str | None = None,
    broadcast: bool = True,
    allow_aliases: bool = False,
) -> TensorParallel:
    """Tensor parallelism: each rank along an axis keeps a piece of the parameters that the plan names.

    Call it before fully_shard() and replicate(), which take the other axes.

    Args:
        plan: names of modules or parameters, and how to divide them. `*` stands for any text without a dot. The first
            name that fits counts.
        axis: the name of the axis, if the mesh has several.
        broadcast: first give all ranks along the axis the values of the first one.
        allow_aliases: allow views and aliases of parameters that exist already, which keep their present values.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> shardwise.cpp.parallelize(model, mesh["tp"], {"up": shardwise.cpp.colwise(), "down": shardwise.cpp.rowwise()})
    >>> shardwise.fully_shard(model, mesh=mesh["dp"])
    """
    engine, name = _axis_of(mesh, axis, "parallelize")
    return _C.parallelize(
        inner(module), engine, name, list(plan.items()), broadcast=broadcast, allow_aliases=allow_aliases
    )


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a Pipeline.

    Args:
        microbatches: a batch is cut into this many parts along dimension 0.
        loss: a function of two lists, the outputs and the targets. It returns the mean over the rows of a microbatch.
        schedule: one of torch's names, such as "1F1B" or "ZBVZeroBubble".
        stages_per_rank: how many stages each rank has, if the schedule allows several.
        mean: whether gradients are those of the mean over the batch. If not, the losses of microbatches are added up.
        gather_once: whether sharded stages keep full parameters from their first forward in a step to their last
            backward.

    >>> options = shardwise.cpp.PipelineOptions(microbatches=8, loss=loss_of, schedule="Interleaved1F1B")
    """

    microbatches: int
    loss: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor] | None = None
    schedule: str = "1F1B"
    stages_per_rank: int = 2
    mean: bool = True
    gather_once: bool = True


@dataclass(frozen=True)
class PipelineResult:
    """What the last stage computed: a loss for each microbatch, and the outputs of the batch. Empty on other ranks."""

    losses: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Pipeline:
    """Runs a model whose stages lie on the ranks along an axis of a mesh, microbatch by microbatch.

    `make(number)` returns a stage of this rank: a C++ module, wrapped or not, or a tuple of a function to call and the
    module that has its parameters. A stage is called with the outputs of the stage before. All ranks call the same
    methods. An error on one rank is raised on all of them; drop the gradients of that step then.

    >>> options = shardwise.cpp.PipelineOptions(microbatches=8, loss=loss_of)
    >>> pipeline = shardwise.cpp.Pipeline(mesh["pp"], make_stage, options)
    >>> losses = pipeline.step(inputs, targets)
    """

    def __init__(
        self, mesh: AnyMesh, make: Callable[[int], Any], options: PipelineOptions, *, axis: str | None = None
    ) -> None:
        """`axis` names the axis of the stages, if the mesh has several."""
        self._mesh, self._axis = _axis_of(mesh, axis, "Pipeline")
        self._options = _made(options)
        self._pipeline = _C.Pipeline(self._mesh, self._axis, lambda number: _stage(make(number)), self._options)

    @property
    def stages(self) -> int:
        """The number of stages on all ranks together.

        >>> pipeline.stages
        """
        return self._pipeline.stages

    @property
    def own_stages(self) -> list[int]:
        """The numbers of this rank's stages.

        >>> pipeline.own_stages
        """
        return _C.Pipeline.stages_of(self._mesh, self._axis, self._options)

    def step(self, inputs: Tensors = (), targets: Tensors = ()) -> list[torch.Tensor]:
        """Runs forward and backward of a batch, and returns the losses of its microbatches.

        The rank with the first stage gives the inputs. The rank with the last stage gives the targets and gets the
        losses; other ranks get an empty list.

        >>> losses = pipeline.step(inputs, targets)
        """
        return self._pipeline.step(_listed(inputs), _listed(targets))[0]

    def evaluate(self, inputs: Tensors = (), targets: Tensors = ()) -> PipelineResult:
        """Runs forward only, without gradients.

        >>> outputs = pipeline.evaluate(inputs).outputs
        """
        return PipelineResult(*self._pipeline.evaluate(_listed(inputs), _listed(targets)))

    def table(self) -> str:
        """What each rank does in a step, a line for each.

        >>> print(pipeline.table())
        """
        return self._pipeline.table()

    def bubble(self) -> list[float]:
        """The share of a step in which each rank computes nothing.

        It assumes that stages cost the same, that a backward takes twice as long as a forward, and that transfers take
        no time.

        >>> pipeline.bubble()
        """
        return self._pipeline.bubble()


def _stage(made: Any) -> tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], Any]:
    function, module = made if isinstance(made, tuple) else (made, made)
    return lambda inputs: _listed(function(*inputs)), inner(module)


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _made(options: PipelineOptions) -> _C.PipelineOptions:
    names = {name.lower(): name for name in SCHEDULES}
    schedule = names.get(str(options.schedule).lower())
    if schedule is None:
        known = ", ".join(SCHEDULES)
        raise ValueError(f"shardwise: Pipeline: the schedule is {options.schedule!r}; it must be one of {known}.")
    return _C.PipelineOptions(
        schedule=schedule, microbatches=options.microbatches, stages_per_rank=options.stages_per_rank,
        loss=options.loss, mean=options.mean, gather_once=options.gather_once,
    )  # fmt: skip


def _axis_of(mesh: AnyMesh, axis: str | None, function: str) -> tuple[_C.Mesh, str]:
    mesh = cpp_mesh(mesh, name=axis or "ranks")
    names = [name for name, _ in mesh.axes]
    if axis is None and len(names) > 1:
        raise ValueError(
            f"shardwise: {function}(): the mesh has the axes {', '.join(names)}. Pass one of them, such as "
            f"mesh[{names[-1]!r}], or name it with axis={names[-1]!r}."
        )
    return mesh, axis or names[0]
