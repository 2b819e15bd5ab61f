"""Memory that wrapped modules keep for their next step."""

from __future__ import annotations

from torch import nn

from shardwise._state import unit_of


def free_idle_memory(module: nn.Module) -> None:
    """Frees the memory that a wrapped module keeps for its next step and does not use: on a device that of its units,
    on a CPU that of the process. The next step allocates it again.

    >>> shardwise.free_idle_memory(model)
    >>> evaluate(another_model)
    """
    unit_of(module).free_idle_memory()
