"""Whether optimizers of torch's step on the shards by themselves."""

from __future__ import annotations

#: What the program, install() or uninstall() said last.
enabled = False


def set_local_optimizers(enabled: bool) -> None:
    """Whether torch's optimizers that hold parameters of ours step on this rank's shards, as local_optimizer() does.

    For every element-wise optimizer of torch's own classes, whenever and wherever it was made: its steps cost hardly
    more than those of plain tensors, with the same bits. Nothing else about it changes, not even its class. A step that
    cannot be made so is made as before: of other classes, with differentiable=True, or if a state lies on the ranks in
    another way than its parameter. install() turns this on, uninstall() off.

    >>> shardwise.set_local_optimizers(True)
    """
    globals()["enabled"] = enabled
