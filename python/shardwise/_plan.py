"""What a wrapped module does in a step, as a table and as data."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from shardwise import _C
from shardwise._state import unit_of


class Plan:
    """What a wrapped module does in a step. str() and repr() give a table; `units` has the same as data.

    >>> [unit["name"] for unit in shardwise.plan(model).units]
    """

    def __init__(self, unit: _C.Unit) -> None:
        self._table = unit.plan_table()
        self._json = unit.plan_json()
        data = json.loads(self._json)
        self.mesh: str = data["mesh"]
        self.units: list[dict[str, Any]] = data["units"]

    def __repr__(self) -> str:
        return self._table

    def json(self) -> str:
        """The same as JSON, for programs.

        >>> Path("plan.json").write_text(shardwise.plan(model).json())
        """
        return self._json


def plan(module: nn.Module) -> Plan:
    """Returns the plan of a module that fully_shard() or replicate() has wrapped.

    >>> print(shardwise.plan(model))
    """
    return Plan(unit_of(module))
