"""Which units the methods of a wrapped module speak of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn

from shardwise import _C
from shardwise._cpp_modules import inner, is_cpp
from shardwise._state import State, state_of


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


def units_of(module: object, recurse: bool) -> Iterable[_C.Unit | _C.CppUnit]:
    """The units of this module and, with `recurse`, of those below, including C++ modules."""
    yield from (state.unit for state in states_of(module, recurse))
    yield from cpp_units_of(module, recurse)


def cpp_units_of(module: object, recurse: bool) -> Iterable[_C.CppUnit]:
    """The units of C++ modules below: modules() of a Python module yields these, not the nn.Modules around them."""
    for each in cast(nn.Module, module).modules() if recurse else ():
        if is_cpp(each) and state_of(each) is None:
            unit = _C.cpp_unit(inner(each))
            if unit is not None:
                yield unit
