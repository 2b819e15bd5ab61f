"""Skips what needs a GPU where there is none."""

from __future__ import annotations

import devices
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if devices.DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip("SHARDWISE_TEST_DEVICE is cuda: torch finds no GPU"))
