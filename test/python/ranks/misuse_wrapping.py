"""Wrong arguments of fully_shard() and replicate(), and modules that they do not take."""

from __future__ import annotations

import warnings

import torch
from misuse import case, data, two_layers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ONCE = "Each distinct composable distributed API can only be applied to a module once"
CONTAINER = "does not support containers that do not implement forward"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@case(AssertionError, f"{ONCE}. fully_shard has already been applied")
def fully_shard_twice(engine, watch):
    engine.fully_shard(watch(engine.fully_shard(two_layers())))


@case(AssertionError, f"{ONCE}. replicate has already been applied")
def replicate_twice(engine, watch):
    engine.replicate(watch(engine.replicate(two_layers())))


@case(AssertionError, ONCE)
def a_list_with_a_module_that_is_wrapped(engine, watch):
    model = two_layers()
    engine.fully_shard(model[1])
    engine.fully_shard(list(watch(model)))


@case(AssertionError, ONCE)
def a_list_with_a_module_twice(engine, watch):
    model = watch(two_layers())
    engine.fully_shard([model[0], model[0]])


@case(RuntimeError, "Cannot apply `replicate()` on a Module already managed by `fully_shard`")
def replicate_after_fully_shard(engine, watch):
    engine.replicate(watch(engine.fully_shard(two_layers())))


@case(RuntimeError, "already managed by `fully_shard`", ours_only=(AssertionError, "more than once."))
def replicate_of_a_list_after_fully_shard(engine, watch):
    model = two_layers()
    engine.fully_shard(model[1])
    engine.replicate(list(watch(model)))


@case(AssertionError, "already managed by `replicate`", ours_only=(AssertionError, "more than once."))
def fully_shard_after_replicate(engine, watch):
    engine.fully_shard(watch(engine.replicate(two_layers())))


@case(ValueError, f"fully_shard {CONTAINER}")
def fully_shard_of_a_module_list(engine, watch):
    engine.fully_shard(watch(nn.ModuleList(two_layers())))


@case(ValueError, f"fully_shard {CONTAINER}")
def fully_shard_of_a_module_dict(engine, watch):
    engine.fully_shard(watch(nn.ModuleDict({"a": nn.Linear(2, 2)})))


@case(ValueError, f"replicate {CONTAINER}")
def replicate_of_a_module_list(engine, watch):
    engine.replicate(watch(nn.ModuleList(two_layers())))


@case(ValueError, f"replicate {CONTAINER}")
def replicate_of_a_module_dict(engine, watch):
    engine.replicate(watch(nn.ModuleDict({"a": nn.Linear(2, 2)})))


@case(ValueError, "got an empty list", ours_only=(IndexError, "tuple index out of range"))
def fully_shard_of_an_empty_list(engine, watch):
    engine.fully_shard([])


@case(TypeError, "nn.Module", ours_only=(TypeError, "'int' object is not iterable"))
def fully_shard_of_a_number(engine, watch):
    engine.fully_shard(42)


# Meshes


@case(ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got")
def fully_shard_on_three_dimensions(engine, watch):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    engine.fully_shard(watch(two_layers()), mesh=mesh)


@case(AssertionError, "Please init the 2D mesh for HSDP with mesh_dim_names specified")
def fully_shard_on_two_dimensions_without_names(engine, watch):
    engine.fully_shard(watch(two_layers()), mesh=init_device_mesh("cpu", (1, 1)))


@case(ValueError, "replicate expects a 1D DeviceMesh but got")
def replicate_on_two_dimensions(engine, watch):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    engine.replicate(watch(two_layers()), mesh=mesh)


@case(ValueError, "replicate expects a 1D DeviceMesh but got")
def replicate_on_three_dimensions(engine, watch):
    engine.replicate(watch(two_layers()), mesh=init_device_mesh("cpu", (1, 1, 1)))


@case(TypeError, "DeviceMesh", ours_only=(AttributeError, "'str' object has no attribute 'ndim'"))
def a_mesh_that_is_none_of_torchs(engine, watch):
    engine.fully_shard(watch(two_layers()), mesh="cpu")


# Arguments


@case(TypeError, "positional argument")
def a_mesh_without_its_name(engine, watch):
    engine.fully_shard(watch(two_layers()), init_device_mesh("cpu", (1,)))


@case(TypeError, "unexpected keyword argument 'device_mesh'")
def replicate_with_the_name_of_old(engine, watch):
    engine.replicate(watch(two_layers()), device_mesh=init_device_mesh("cpu", (1,)))


@case(TypeError, "unexpected keyword argument 'reshard_after_forward'")
def replicate_does_not_reshard(engine, watch):
    engine.replicate(watch(two_layers()), reshard_after_forward=True)


@case(TypeError, "unexpected keyword argument 'shard_placement_fn'")
def replicate_does_not_place(engine, watch):
    engine.replicate(watch(two_layers()), shard_placement_fn=lambda p: Shard(0))


@case(ValueError, "reshard_after_forward should be a bool or an int representing the group size to reshard to, not yes")
def reshard_after_forward_of_text(engine, watch):
    engine.fully_shard(watch(two_layers()), reshard_after_forward="yes")


@case(ValueError, "reshard_after_forward should be a bool or an int representing the group size to reshard to, not 1.5")
def reshard_after_forward_of_a_fraction(engine, watch):
    engine.fully_shard(watch(two_layers()), reshard_after_forward=1.5)


@case(ValueError, "it should be a factor of 1, not 0")
def reshard_after_forward_to_nobody(engine, watch):
    engine.fully_shard(watch(two_layers()), reshard_after_forward=0)


@case(ValueError, "it should be a factor of 1, not -1")
def reshard_after_forward_below_nobody(engine, watch):
    engine.fully_shard(watch(two_layers()), reshard_after_forward=-1)


@case(ValueError, "it should be a factor of 2, not 3", ranks=2)
def reshard_after_forward_to_more_than_there_are(engine, watch):
    engine.fully_shard(watch(two_layers()), reshard_after_forward=3)


@case(ValueError, "it should be a factor of 1, not 2", ranks=2)
def reshard_after_forward_counts_the_ranks_that_shard(engine, watch):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    engine.fully_shard(watch(two_layers()), mesh=mesh, reshard_after_forward=2)


@case(TypeError, "mp_policy", ours_only=(TypeError, "replace() should be called on") if TORCH >= (2, 15) else True)
def a_dtype_for_a_policy(engine, watch):
    engine.fully_shard(watch(two_layers()), mp_policy=torch.bfloat16)


@case(TypeError, "offload_policy", ours_only=True)
def a_flag_for_a_policy_of_offload(engine, watch):
    engine.fully_shard(watch(two_layers()), offload_policy=True)


@case(TypeError, "ignored_params", ours_only=(RuntimeError, "The size of tensor a"))
def ignored_parameters_in_a_list(engine, watch):
    model = watch(two_layers())
    engine.fully_shard(model, ignored_params=[model[0].weight])


# Parameters


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))


@case(ValueError, "doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.")
def fully_shard_of_a_scalar(engine, watch):
    engine.fully_shard(watch(Scaled()))


@case(ValueError, "doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.")
def replicate_of_a_scalar(engine, watch):
    engine.replicate(watch(Scaled()))


@case(ValueError, "'weight' belongs to a layer with max_norm", ranks=2, ours_only=True)
def replicate_of_a_layer_that_changes_its_weight(engine, watch):
    engine.replicate(watch(nn.Embedding(4, 3, max_norm=1)))


@case(UserWarning, "'weight' belongs to a layer with max_norm", ranks=2, ours_only=True)
def fully_shard_of_a_layer_that_changes_its_weight(engine, watch):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*max_norm")
        engine.fully_shard(watch(nn.Embedding(4, 3, max_norm=1)))


def transposed() -> nn.Sequential:
    model = two_layers()
    model[1].weight = nn.Parameter(torch.ones(4, 2).t())
    return model


# torch has sharded the layer before it by then.
@case(NotImplementedError, "FSDP does not support non-contiguous parameters yet", torch_keeps=False)
def fully_shard_of_a_transposed_parameter(engine, watch):
    engine.fully_shard(watch(transposed()))


@case(NotImplementedError, "FSDP does not support uneven sharding on dim 1", ranks=2, torch_keeps=False)
def uneven_sharding_of_columns(engine, watch):
    engine.fully_shard(watch(two_layers()), shard_placement_fn=lambda p: Shard(1) if p.shape == (4, 3) else None)


@case(NotImplementedError, "FSDP does not support uneven sharding on dim 1", ranks=2, torch_keeps=False)
def uneven_sharding_of_columns_counted_from_the_end(engine, watch):
    engine.fully_shard(watch(two_layers()), shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 else None)


@case(AssertionError, "Shard dim 1 is invalid for 1D tensor", torch_keeps=False)
def sharding_of_a_dimension_that_is_not_there(engine, watch):
    engine.fully_shard(watch(two_layers()), shard_placement_fn=lambda p: Shard(1))


@case(
    ValueError,
    "Invalid shard_placement_fn result",
    ours_only=False if TORCH >= (2, 15) else (AttributeError, "object has no attribute 'dim'"),
    torch_keeps=False,
)
def a_placement_that_does_not_shard(engine, watch):
    engine.fully_shard(watch(two_layers()), shard_placement_fn=lambda p: Replicate())


def parallel(mesh: DeviceMesh) -> nn.Sequential:
    """The first weight lies on every dimension of the mesh."""
    model = two_layers()
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, placements))
    return model


class Local(nn.Module):
    """Computes with what this rank has of a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to_local().t()


@case(NotImplementedError, "FSDP only supports 1D TP/EP or 2D EP+TP, not", torch_keeps=False)
def three_dimensions_of_tensor_parallelism(engine, watch):
    mesh = init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=("dp", "a", "b", "c"))
    engine.fully_shard(watch(parallel(mesh["a", "b", "c"])), mesh=mesh["dp"])


# What the whole model shows


# From torch 2.12 on torch says so too; 2.11 trains the two halves apart.
@case(ValueError, "already managed by another", ours_only=TORCH < (2, 12), torch_keeps=False)
def a_parameter_of_two_groups(engine, watch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    engine.fully_shard(model[0])
    engine.fully_shard(model[1])
    engine.fully_shard(model)(data())
