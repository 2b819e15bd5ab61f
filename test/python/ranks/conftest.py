"""Chooses the tests whose ranks can train where SHARDWISE_TEST_DEVICE says."""

from __future__ import annotations

import devices
import pytest
import torch

#: The file whose models and data follow the device. What the others make is on the CPU.
ON_DEVICES = "test_training_core"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if devices.DEVICE == "cpu":
        return
    others = [item for item in items if item.path.stem != ON_DEVICES]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if devices.DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip("SHARDWISE_TEST_DEVICE is cuda: torch finds no GPU"))
