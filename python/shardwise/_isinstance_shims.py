"""The classes that install() puts in the place of torch's: a module of either engine is an instance of them."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from shardwise import _module_classes, _torch_api


# Derives from ABCMeta, so that a program's class can inherit from an abstract class and one of these.
class _Either(ABCMeta):
    """isinstance() and issubclass() check against torch's class, which is a base of both engines' modules."""

    def __instancecheck__(cls, instance: Any) -> bool:
        torchs = cls.__dict__.get("_torchs")
        return super().__instancecheck__(instance) if torchs is None else isinstance(instance, torchs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        torchs = cls.__dict__.get("_torchs")
        return super().__subclasscheck__(subclass) if torchs is None else issubclass(subclass, torchs)


# The classes of our modules have no metaclass: it would clash with those of users' modules.
class FSDPModule(_module_classes.FSDPModule, metaclass=_Either):
    __doc__ = _module_classes.FSDPModule.__doc__
    _torchs = _torch_api.FSDPModule


class ReplicateModule(_module_classes.ReplicateModule, metaclass=_Either):
    __doc__ = _module_classes.ReplicateModule.__doc__
    _torchs = _torch_api.ReplicateModule
