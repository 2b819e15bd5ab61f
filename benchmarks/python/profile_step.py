"""Profiles one step of a GPT on one rank, and writes step.svg, step.md and the trace of torch's profiler.

usage: profile_step.py --out FOLDER [--device cuda] [--wrap fully_shard] [--layers 8 --width 512 --heads 8]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device import Device
from wrappings import Steps, make_model

sys.path.append(str(Path(__file__).resolve().parent.parent))
from profile_picture import Span, picture, table

WARM_UP = 3


def spans_of(profile: Any) -> Iterator[Span]:
    """Kernels by stream; of the host, the operations that no other one called."""
    threads: dict[int, str] = {}
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            yield Span(f"stream {event.device_resource_id}", event.name, event.time_range.start, event.time_range.end)
        elif event.cpu_parent is None:
            lane = threads.setdefault(event.thread, f"host thread {len(threads) + 1}")
            yield Span(lane, event.name, event.time_range.start, event.time_range.end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--wrap", default="fully_shard")
    for name, usual in {"layers": 8, "width": 512, "heads": 8, "batch": 8, "length": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    device = Device(options.device, 0)
    dist.init_process_group(device.back_end("shardwise"), store=dist.HashStore(), rank=0, world_size=1)
    model = make_model(options.layers, options.width, options.heads, options.length).to(device.device)
    steps = Steps(model, options.wrap)
    random = torch.Generator().manual_seed(1)
    shape = (options.batch, options.length + 1)
    text = torch.randint(0, model.bytes.num_embeddings, shape, generator=random).to(device.device)
    for _ in range(WARM_UP):
        steps.step(text)
    device.synchronize()
    with torch.profiler.profile() as profile:
        begin = time.monotonic()
        steps.step(text)
        issued = time.monotonic() - begin
        device.synchronize()
        whole = time.monotonic() - begin
    spans = list(spans_of(profile))
    facts = {"the step": 1e3 * whole, "of that, the host until all is given to the device": 1e3 * issued}
    shown = table(spans, facts)
    (options.out / "step.svg").write_text(picture(spans))
    (options.out / "step.md").write_text(shown)
    (options.out / "step.json").write_text(json.dumps([vars(span) for span in spans]))
    profile.export_chrome_trace(str(options.out / "trace.json"))
    print(shown, end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
