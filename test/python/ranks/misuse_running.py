"""Wrong calls of wrapped modules: their methods, and runs that they cannot do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from misuse import case, data, two_layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

ON_META = "FSDP parameters should be materialized from meta device before training"


@case(AssertionError, "FSDP does not support deepcopy. Please use state dict for serialization.")
def copy_of_a_sharded_module(engine, watch):
    copy.deepcopy(watch(engine.fully_shard(two_layers())))


@case(AssertionError, "FSDP does not support deepcopy. Please use state dict for serialization.")
def copy_of_a_replicated_module(engine, watch):
    copy.deepcopy(watch(engine.replicate(two_layers())))


@case(AssertionError, "FSDP does not support deepcopy. Please use state dict for serialization.")
def copy_of_a_module_with_a_sharded_one(engine, watch):
    model = two_layers()
    engine.fully_shard(model[1])
    copy.deepcopy(watch(model))


# Methods


@case(ValueError, "reshard_after_forward should be a bool, got <class 'int'>")
def set_reshard_after_forward_to_a_number(engine, watch):
    watch(engine.fully_shard(two_layers())).set_reshard_after_forward(1)


@case(ValueError, "reshard_after_forward should be a bool, got <class 'NoneType'>")
def set_reshard_after_forward_to_none(engine, watch):
    watch(engine.fully_shard(two_layers())).set_reshard_after_forward(None)


# torch has an assertion without a text there.
@case(AssertionError, "replicate", ours_only=(AssertionError, ""))
def set_reshard_after_forward_of_replicate(engine, watch):
    watch(engine.replicate(two_layers())).set_reshard_after_forward(True)


@case(TypeError, "positional argument")
def set_requires_gradient_sync_without_a_name(engine, watch):
    watch(engine.fully_shard(two_layers())).set_requires_gradient_sync(False, False)


@case(TypeError, "positional argument")
def set_requires_all_reduce_without_a_name(engine, watch):
    watch(engine.fully_shard(two_layers())).set_requires_all_reduce(False, False)


@case(TypeError, "positional argument")
def set_reshard_after_backward_without_a_name(engine, watch):
    watch(engine.replicate(two_layers())).set_reshard_after_backward(False, False)


@case(ValueError, "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>")
def forward_prefetch_of_a_plain_module(engine, watch):
    model = two_layers()
    engine.fully_shard(model[0])
    watch(engine.fully_shard(model)).set_modules_to_forward_prefetch([model[0], model[1]])


@case(ValueError, "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>")
def backward_prefetch_of_a_plain_module(engine, watch):
    watch(engine.replicate(two_layers())).set_modules_to_backward_prefetch([nn.Linear(2, 2)])


@case(TypeError, "object is not iterable")
def forward_prefetch_of_one_module(engine, watch):
    model = two_layers()
    engine.fully_shard(model[0])
    watch(engine.fully_shard(model)).set_modules_to_forward_prefetch(model[0])


@case(ValueError, "stream cannot be set when using native HSDP")
def a_stream_for_the_hook_of_two_dimensions(engine, watch):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = watch(engine.fully_shard(two_layers(), mesh=mesh))
    model.set_all_reduce_hook(lambda output: None, stream=torch.cpu.current_stream())


@case(AssertionError, "all reduce hook stream is specified but hook itself is missing.")
def a_stream_without_a_hook(engine, watch):
    model = engine.fully_shard(two_layers())
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


@case(AssertionError, "when all gather comm is custom: Gather")
def the_groups_memory_for_a_gather_of_ones_own(engine, watch):
    model = watch(engine.fully_shard(two_layers()))
    model.set_custom_all_gather(Gather())
    model.set_allocate_memory_from_process_group_for_comm(True)


@case(AssertionError, "when reduce scatter comm is custom: Scatter")
def the_groups_memory_for_a_scatter_of_ones_own(engine, watch):
    model = watch(engine.fully_shard(two_layers()))
    model.set_custom_reduce_scatter(Scatter())
    model.set_allocate_memory_from_process_group_for_comm(True)


@case(ValueError, "divide factor", ours_only=True)
def gradients_divided_by_nothing(engine, watch):
    watch(engine.fully_shard(two_layers())).set_gradient_divide_factor(0.0)


@case(ValueError, "does not have a method forward_features")
def a_forward_method_that_is_not_there(engine, watch):
    engine.register_fsdp_forward_method(watch(engine.fully_shard(two_layers())), "forward_features")


@case(ValueError, "does not have a method forward_features")
def a_forward_method_that_is_not_there_in_replicate(engine, watch):
    engine.register_fsdp_forward_method(watch(engine.replicate(two_layers())), "forward_features")


@case(ValueError, "Expects list of FSDPModules but got Linear")
def share_comm_ctx_of_a_plain_module(engine, watch):
    engine.share_comm_ctx([watch(nn.Linear(2, 2))])


@case(ValueError, "Expects list of FSDPModules but got Linear")
def share_comm_ctx_of_a_plain_module_among_others(engine, watch):
    engine.share_comm_ctx([watch(engine.fully_shard(two_layers())), watch(nn.Linear(2, 2))])


# The first forward


@case(RuntimeError, "FSDP requires a single root module but got")
def a_list_as_the_root(engine, watch):
    model = two_layers()
    engine.fully_shard(list(model))
    watch(model)(data())


@case(RuntimeError, "Replicate requires a single root module but got")
def a_replicated_list_as_the_root(engine, watch):
    model = two_layers()
    engine.replicate(list(model))
    watch(model)(data())


@case(RuntimeError, "FSDP state has already been lazily initialized for 0")
def a_child_before_its_root(engine, watch):
    model = two_layers()
    engine.fully_shard(model[0])
    engine.fully_shard(model)
    watch(model)[0](data())
    watch(model)(data())


@case(RuntimeError, "requires running forward through the root module first")
def a_replicated_child_before_its_root(engine, watch):
    model = two_layers()
    engine.replicate(model[0])
    engine.replicate(model)
    model[0](data())
    watch(model)(data())


@case(RuntimeError, f"{ON_META}, but the following were still on meta device: ['0.weight', '0.bias', '1.weight', '1.b")
def forward_with_parameters_on_meta(engine, watch):
    with torch.device("meta"):
        model = two_layers()
    watch(engine.fully_shard(model))(data())


@case(RuntimeError, f"{ON_META}, but the following were still on meta device: ['1.weight', '1.bias']")
def forward_with_a_child_on_meta(engine, watch):
    model = two_layers()
    model[1].to("meta")
    engine.fully_shard(model[1])
    watch(engine.fully_shard(model))(data())


@case(RuntimeError, ON_META)
def forward_of_replicate_with_parameters_on_meta(engine, watch):
    with torch.device("meta"):
        model = two_layers()
    watch(engine.replicate(model))(data())


@case(RuntimeError, ON_META)
def unshard_with_parameters_on_meta(engine, watch):
    with torch.device("meta"):
        model = two_layers()
    watch(engine.fully_shard(model)).unshard()


# Ours has a group for each dtype.
@case(AssertionError, "FSDP expects uniform original parameter dtype but got", torch_only=True)
def trained_parameters_of_two_dtypes(engine, watch):
    model = engine.fully_shard(watch(nn.Sequential(nn.Linear(3, 4), Widen(), nn.Linear(4, 2).double())))
    watch(model)(data()).sum().backward()
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


@case(AssertionError, "FSDP expects uniform original parameter dtype but got", torch_only=True)
def replicated_parameters_of_two_dtypes(engine, watch):
    model = engine.replicate(watch(nn.Sequential(nn.Linear(3, 4), Widen(), nn.Linear(4, 2).double())))
    watch(model)(data()).sum().backward()
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


# Sharded parameters where full ones are wanted


@case(RuntimeError, "got mixed torch.Tensor and DTensor")
def a_child_that_is_not_wrapped_is_called(engine, watch):
    model = watch(engine.fully_shard(two_layers()))
    model[0](data())


@case(RuntimeError, "got mixed torch.Tensor and DTensor")
def a_plain_state_dict_is_loaded(engine, watch):
    model = watch(engine.fully_shard(two_layers()))
    model.load_state_dict(two_layers().state_dict())


@case(RuntimeError, "size mismatch for 0.weight", ranks=2)
def a_state_dict_of_other_sizes_is_loaded(engine, watch):
    # What fits is loaded, as in any module.
    model = engine.fully_shard(two_layers())
    other = engine.fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    model.load_state_dict(other.state_dict())


@case(RuntimeError, "Trying to backward through the graph a second time")
def backward_twice(engine, watch):
    model = engine.fully_shard(two_layers())
    loss = model(data()).pow(2).sum()
    loss.backward()
    loss.backward()


@case(RuntimeError, "shape '[7]' is invalid for input of size 4")
def an_error_of_the_model_comes_as_it_is(engine, watch):
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[0].view(7)

    model = Breaks(3, 4)
    engine.fully_shard(model)(data())


def right_call_after_a_wrong_one(engine) -> None:
    """torch keeps the mark of the call that failed, and says that the module is wrapped already."""
    for wrap in (engine.fully_shard, engine.replicate):
        model = two_layers()
        reference = copy.deepcopy(model)
        model[1].weight = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match="scalar"):
            wrap(model)
        model[1].weight = nn.Parameter(reference[1].weight.detach().clone())
        if engine.name == "torch":
            with pytest.raises(AssertionError, match="only be applied to a module once"):
                wrap(model)
            continue
        wrap(model)
        output = model(data() + dist.get_rank())
        torch.testing.assert_close(output, reference(data() + dist.get_rank()))
