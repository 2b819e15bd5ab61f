"""Data parallelism for PyTorch and LibTorch on one C++ engine over c10d.

>>> import shardwise
>>> model = shardwise.replicate(model)  # under torchrun, or after torch.distributed.init_process_group()
"""

from pathlib import Path

from shardwise import _compatibility

_compatibility.check()

from shardwise import transport  # noqa: E402
from shardwise._build_info import VERSION as __version__  # noqa: E402
from shardwise._C import Error, PeerError  # noqa: E402
from shardwise.replicate import Plan, ReplicateModule, plan, replicate  # noqa: E402

transport.register()

#: Give this to CMake as CMAKE_PREFIX_PATH; find_package(shardwise) then finds the C++ library of this package.
cmake_prefix_path = str(Path(__file__).parent / "share" / "cmake")

__all__ = [
    "Error",
    "PeerError",
    "Plan",
    "ReplicateModule",
    "__version__",
    "cmake_prefix_path",
    "plan",
    "replicate",
]
