"""What fully_shard() and replicate() share: they check the call, and record in torch's way what was wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, contract
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _cpp_wrapping
from shardwise._arguments import Arguments, check_kinds, check_module, roots_of
from shardwise._cpp_modules import takes
from shardwise._meshes import default_mesh, device_mesh_of
from shardwise._state import State

#: Wraps a module, or a list of modules.
Wrap = Callable[[Any, Arguments], Any]


class Contract:
    """One of the two functions. `own` wraps Python modules; `torchs` is torch's function of the same name."""

    def __init__(self, own: Wrap, state: type[State], torchs: Any) -> None:
        self._own = own
        self._torchs = torchs
        self._decorated: Any = contract(state_cls=cast(Any, state))(own)

    def __call__(self, module: Any, given: Arguments) -> Any:
        """Wraps the module, so that torch's function finds its state too. A failure leaves no state behind."""
        name = self._own.__name__
        if takes(module):
            return _cpp_wrapping.wrap(name, module, given)
        is_list = isinstance(module, (list, tuple)) and all(isinstance(each, nn.Module) for each in module)
        if not is_list and not isinstance(module, nn.Module):
            raise TypeError(f"shardwise: {name}() expects an nn.Module or a list of them, not {module!r:.200}.")
        roots = roots_of(module)
        if not roots:
            raise ValueError(f"shardwise: {name}() got an empty list. Pass at least one module.")
        new = [each for each in roots if self._own not in each.__dict__.get(STATE_KEY, {})]
        try:
            result = self._decorated(module, given)
        except BaseException:
            for each in new:
                each.__dict__.get(STATE_KEY, {}).pop(self._own, None)
                each.__dict__.get(REGISTRY_KEY, {}).pop(name, None)
            raise
        for each in roots:
            states = each.__dict__[STATE_KEY]
            states[self._torchs.__wrapped__] = states[self._own]
        return result

    def state(self, module: nn.Module) -> State:
        """The state that contract() made for the call in which this module was wrapped."""
        return cast(State, self._decorated.state(module))


def checked(function: str, module: Any, given: Arguments) -> tuple[tuple[nn.Module, ...], DeviceMesh]:
    """The outermost modules of a call, and its mesh. Raises an error for arguments that the function does not take."""
    replicates = function == "replicate"
    roots = roots_of(module)
    mesh = device_mesh_of(given.mesh, replicates)
    check_kinds(function, given, mesh)
    for root in roots:
        check_module(root, function)
    return roots, mesh or default_mesh(replicates)
