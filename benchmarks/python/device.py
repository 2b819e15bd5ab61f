"""Where a rank computes, and what can be seen of it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from meters import Meters

REPLAYS = 20
#: Kernels that move numbers and compute nothing: torch's, and ours (csrc/cuda/kernels.cu).
COPIES = ("Memcpy", "copy", "CatArray", "split_with_sizes", "move_kernel")


@dataclass(frozen=True)
class Kernel:
    name: str
    stream: int
    seconds: float


def on_the_busiest_stream(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """The one with most kernels computes; NCCL has its own."""
    by_stream: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel.stream, []).append(kernel)
    found = max(by_stream.values(), key=len, default=[])
    copies = [kernel for kernel in found if any(word in kernel.name for word in COPIES)]
    return {
        "kernels": len(found),
        "kernel_seconds": sum(kernel.seconds for kernel in found),
        "copies": len(copies),
        "copy_seconds": sum(kernel.seconds for kernel in copies),
    }


class Device:
    """On the CPU tensors are counted by an allocator before torch's, elsewhere by torch's own.

    `cuda` without a number: ranks take the GPUs in turn.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.device = torch.device("cuda", rank % torch.cuda.device_count()) if name == "cuda" else torch.device(name)
        self._meters = Meters()
        if self.on_cpu:
            self._meters.watch_memory()
        else:
            torch.cuda.set_device(self.device)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def back_end(self, of_cpu: str) -> str:
        return of_cpu if self.on_cpu else f"cpu:{of_cpu},cuda:nccl"

    def synchronize(self) -> None:
        """Waits until the device has done what it was given."""
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)

    def bytes(self) -> int:
        return self._meters.bytes() if self.on_cpu else torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return self._meters.peak_bytes() if self.on_cpu else torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        self._meters.forget_peak() if self.on_cpu else torch.cuda.reset_peak_memory_stats(self.device)

    def copies(self, step: Callable[[], None]) -> dict[str, Any]:
        """What a step's kernels do on the stream that computes."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            self.synchronize()
        return on_the_busiest_stream(
            Kernel(event.name, event.device_resource_id, event.time_range.elapsed_us() / 1e6)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )

    def replayed(self, passes: Callable[[], None]) -> dict[str, Any]:
        """The seconds of replays of a graph of the passes, or why there is none."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                passes()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                passes()
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
        times = {"eager_seconds": passes, "seconds": graph.replay}
        return {name: [self._seconds(act) for _ in range(REPLAYS)] for name, act in times.items()}

    def _seconds(self, act: Callable[[], None]) -> float:
        self.synchronize()
        begin = time.monotonic()
        act()
        self.synchronize()
        return time.monotonic() - begin
