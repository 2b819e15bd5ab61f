"""What a wrapped module carries, in the shape that torch's own tools look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from shardwise import _C
from shardwise._cpp_modules import inner, is_cpp
from shardwise._logs import LoggedState, log_of
from shardwise._torch_versions import set_param_groups


@dataclass
class ParamGroup:
    """The parameters of one call, for code that reads torch's FSDPParamGroup: pipelines, checkpoints, tools."""

    unit: _C.ModuleUnit
    modules: tuple[nn.Module, ...]
    mesh_info: DataParallelMeshInfo
    post_forward_mesh_info: FSDPMeshInfo | None
    offload_policy: Any
    custom_all_gather: Any = None
    custom_reduce_scatter: Any = None

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules have their full parameters."""
        return self.unit.shows_full

    @property
    def is_sharded(self) -> bool:
        """Whether the modules have their sharded parameters."""
        return not self.unit.shows_full

    def post_backward(self) -> None:
        """Sums gradients in the whole tree that backwards without synchronization left behind, if there are any."""
        self.unit.reduce_pending()


class State(LoggedState):
    """What fully_shard() attaches to its modules: one object for all modules of a call."""

    _kind = "FSDP"

    #: What the hooks report calls to. It passes on to units of parameters with meshes of their own.
    unit: _C.ModuleUnit
    #: One for each mesh of the call's parameters; that of `unit` is the last.
    groups: tuple[ParamGroup, ...]

    def __init__(self) -> None:
        super().__init__()
        #: Parameters that another call had wrapped before: their names here, that call's state, their names there.
        self.shared: list[tuple[str, Callable[[], State | None], str]] = []

    def start(self, modules: Sequence[nn.Module], groups: Sequence[ParamGroup], automatic: bool) -> None:
        """Makes this the state of these modules. From now on their hooks report their calls to the last unit."""
        for module in modules:
            _insert_module_state(module, self)
        self.unit = groups[-1].unit
        self._modules = tuple(modules)
        self.groups = tuple(groups)
        set_param_groups(self, self.groups)
        self._auto_reshard_after_forward = automatic
        self.unit.set_modules(list(modules))
        for module in modules:
            module.register_forward_pre_hook(self.unit.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.unit.post_forward, always_call=True)
        self.log = log_of(self)
        if self.log is not None:
            for module in modules:
                self.log.register(module)
        # Prepended last, and so called before the hooks above.
        self._first_hooks = [
            module.register_forward_pre_hook(self._before_first_forward, prepend=True) for module in modules
        ]

    def _before_first_forward(self, module: nn.Module, args: Any) -> None:
        self._lazy_init()

    def _lazy_init(self) -> None:
        """Runs before the first forward: the state whose module runs first becomes the root of its tree, for good."""
        if self._is_root is None:
            self._become_root()
        for hook in self._first_hooks:
            hook.remove()

    def _become_root(self) -> None:
        if len(self._modules) > 1:
            raise RuntimeError(
                f"shardwise: {self._kind} requires a single root module but got {self._modules}: the first module "
                "that runs a forward was wrapped together with others. Wrap the module around them too."
            )
        root = self._modules[0]
        states: list[State] = []
        for name, module in root.named_modules():
            state = _get_module_fsdp_state(module)
            if state in states or not isinstance(state, State):
                continue
            # As in torch: sharded units below a replicated root are roots of their own.
            if self._kind == "Replicate" and state._kind != "Replicate":
                continue
            if module is not root and state._is_root is not None:
                raise RuntimeError(
                    f"shardwise: {self._kind} state has already been lazily initialized for {name}\n"
                    f"{self._kind} requires running forward through the root module first."
                )
            state.name = name
            states.append(state)
        for state in states:
            for name, other, name_there in state.shared:
                if (there := other()) is not None:
                    raise ValueError(describe_shared(state.path_of(name), there.path_of(name_there)))
        for state in states:
            state.refresh_parameters()
            state.check_values()
        for state in states:
            state._is_root = state is self
            state._state_ctx = self._state_ctx
            state._comm_ctx = self._comm_ctx
        self._state_ctx.all_states.extend(states)
        # The root ends the forward and begins the backward, so freeing its full parameters in between gains nothing.
        if self._auto_reshard_after_forward:
            for group in self.groups:
                group.post_forward_mesh_info = None
            self.unit.set_reshard_after_forward(False)

    def path_of(self, name: str) -> str:
        """The name of this call's parameter as the root knows it, once there is one. Lists keep their numbers."""
        return f"{self.name}.{name}" if self.name and len(self._modules) == 1 else name

    def refresh_parameters(self) -> None:
        """Adopts the parameters that the modules hold now: a load or a cast may have replaced them."""
        self.unit.look_again()

    def take_memory(self) -> None:
        """The same right after a cast: nobody holds the results yet, so they can move into the unit's memory."""
        self.unit.take_memory()

    def check_values(self) -> None:
        """Raises RuntimeError if a module is about to run and its parameters are not on the right device."""
        parameters = {name: p for module in self._modules for name, p in module.named_parameters()}
        empty = [name for name, parameter in parameters.items() if parameter.is_meta]
        if empty:
            raise RuntimeError(
                "shardwise: FSDP parameters should be materialized from meta device before training, but the following "
                f"were still on meta device: {empty}. For example, call module.to_empty(device) to materialize to "
                "device and call module.reset_parameters() on each module to initialize values, or load a state dict."
            )
        elsewhere = [(name, p.device) for name, p in parameters.items() if p.device.type != "cpu"]
        if elsewhere and isinstance(self.groups[-1].offload_policy, CPUOffloadPolicy):
            raise RuntimeError(
                "shardwise: FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {elsewhere}"
            )

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._lazy_init()
        if self.log is not None:
            self.log.pre_forward(module, args, kwargs)
        return self.unit.pre_forward(module, args, kwargs) or (args, kwargs)

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        converted = self.unit.post_forward(module, input, output)
        output = output if converted is None else converted
        if self.log is not None:
            self.log.post_forward(module, input, output)
        return output

    def run(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a method of the module in the way its forward is called."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException:
            self.unit.fail_forward()
            raise
        return self._post_forward(module, args, result)

    def _root_post_backward_final_callback(self) -> None:
        """torch's pipelines run a backward in pieces, and call this at the end."""
        self.unit.reduce_pending()


def describe_shared(name: str, name_there: str) -> str:
    """The text about a parameter that two calls have wrapped."""
    return (
        f"shardwise: the parameter '{name}' is shared with a parameter already managed by another FSDP group, where it "
        f"is '{name_there}': their gradients would not be added. Give both modules to one call, as a list, or name the "
        "parameter in ignored_params."
    )


class ReplicateState(State):
    """What replicate() attaches to its modules."""

    _kind = "Replicate"


def state_of(module: nn.Module) -> State | None:
    """The state of the call that wrapped this module; None if there was none."""
    state = _get_module_fsdp_state(module)
    return state if isinstance(state, State) else None


def unit_of(module: nn.Module) -> _C.Unit:
    """The unit of the call that wrapped this module."""
    if is_cpp(module) and (unit := _C.cpp_unit(inner(module))) is not None:
        return unit
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(
            f"shardwise: neither fully_shard() nor replicate() was called on this {type(module).__name__}."
        )
    return state.unit


def wrapped_state(module: object) -> State:
    """The state of a module that is wrapped."""
    state = state_of(cast(nn.Module, module))
    assert state is not None, f"No FSDP state found on {module}"
    return state


def states_of(module: object, recurse: bool) -> Iterable[State]:
    """The states of this module and, with `recurse`, of those below: one for each module that is wrapped."""
    for each in cast(nn.Module, module).modules() if recurse else [module]:
        if (state := state_of(cast(nn.Module, each))) is not None:
            yield state


def units_of(module: object, recurse: bool) -> Iterable[_C.Unit]:
    """The units of this module and, with `recurse`, of those below, including C++ modules."""
    yield from (state.unit for state in states_of(module, recurse))
    yield from cpp_units_of(module, recurse)


def cpp_units_of(module: object, recurse: bool) -> Iterable[_C.Unit]:
    """The units of C++ modules below: modules() of a Python module yields these, not the nn.Modules around them."""
    for each in cast(nn.Module, module).modules() if recurse else ():
        if is_cpp(each) and state_of(each) is None:
            unit = _C.cpp_unit(inner(each))
            if unit is not None:
                yield unit
