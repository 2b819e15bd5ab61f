"""Whether optimizers of torch's step on the shards by themselves."""

from __future__ import annotations

#: The last choice of the program, of install() or of uninstall().
enabled = False


def set_local_optimizers(enabled: bool) -> None:
    """Whether torch's optimizers step on this rank's shards, as after local_optimizer().

    It applies to all optimizers of torch's own element-wise classes that have parameters of shardwise, also to those
    that exist already. Their steps cost hardly more than those of plain tensors and give the same bits; their classes
    stay the same. Other steps run as before: those of other classes, with differentiable=True, or with a state that is
    not divided like its parameter. install() turns this on, and uninstall() turns it off.

    >>> shardwise.set_local_optimizers(True)
    """
    globals()["enabled"] = enabled
