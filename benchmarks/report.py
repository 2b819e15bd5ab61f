"""Writes what README.md, benchmarks/README.md and docs/performance.md say of the saved figures, and their pictures.

usage: report.py [--check]     --check writes nothing, and fails where something is not what this makes
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import collectives
import cycles
import host
import steps
from bars import Bar, picture
from figures import Saved, load, shown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
TABLE = HERE / "README.md"
PERFORMANCE = HERE.parent / "docs" / "performance.md"
BEGIN = "<!-- benchmarks/report.py writes what follows -->"
END = "<!-- benchmarks/report.py wrote what stands above -->"
#: The columns of the table.
SIDES = ("C++", "Python", "torch's", "DDP")


@dataclass(frozen=True)
class Row:
    """A line of the table: which figure each side has; None where a side has nothing like it."""

    title: str
    suite: str
    unit: str
    names: tuple[str | None, ...]


def row(title: str, suite: str, unit: str, pattern: str, kind: str) -> Row:
    """`pattern` has a place for the wrapping."""
    wraps = {
        "fully_shard": ("C++ fully_shard", "Python fully_shard", "FSDP2", "DDP"),
        "kept": ("C++ fully_shard_keep", "Python fully_shard_keep", "FSDP2 kept", "DDP"),
        "replicate": ("C++ replicate", "Python replicate", "torch's replicate", "DDP"),
    }[kind]
    return Row(title, suite, unit, tuple(pattern.format(wrap) for wrap in wraps))


def rows(title: str, suite: str, unit: str, pattern: str) -> tuple[Row, ...]:
    """The three wrappings."""
    titles = {"fully_shard": title, "kept": "the same, full parameters kept", "replicate": "the same, `replicate`"}
    return tuple(row(text, suite, unit, pattern, kind) for kind, text in titles.items())


def saving(what: str) -> tuple[str | None, ...]:
    return (None, f"shardwise: {what}", f"DCP: {what}", None)


def parallel(what: str) -> Row:
    """One of the layers and microbatches of the suite host."""
    return Row(f"host, {what} beyond the same work alone, thousand instructions", "host", "k instructions more",
               (what, None, f"{what}, torch's", None))  # fmt: skip


WAITS = "keeps a step waiting"
WAITING = (None, f"shardwise: what AsyncSaver.save() {WAITS}", f"DCP: what async_save() {WAITS}", None)


def ours(title: str, suite: str, unit: str, pattern: str, *whats: str) -> tuple[Row, ...]:
    """What only ours in C++ has; title and pattern have places for each of `whats`."""
    return tuple(Row(title.format(what), suite, unit, (pattern.format(what), None, None, None)) for what in whats)


#: Of the suite scale: a model, ranks, and our layout.
PUBLISHED = (("Llama 3 70B", 1024, "rows"), ("GPT-OSS 120B", 1024, "rows"), ("GPT-OSS 120B", 1024, "flat"))


def published(model: str, ranks: int, layout: str) -> Row:
    names = [f"{model} on {ranks} ranks, {each}: step, estimated" for each in (layout, "FSDP2")]
    title = f"{model} on {ranks} ranks, `{layout}`: a step as estimated, x what a rank computes"
    return Row(title, "scale", "x computing", (names[0], None, names[1], None))


HOST = ("host", "k instructions a unit", "{}, 8 blocks of 9")
STEP = ("steps", "x DDP", "26 M, 2 ranks: {}: step")
LARGE = ("steps", "x DDP", "107 M, 2 ranks: {}: step")
SHARED = ("steps_shared_memory", *STEP[1:])
LARGE_SHARED = ("steps_shared_memory", *LARGE[1:])
SAME = tuple((*case[:2], f"{case[2]}, same transport") for case in (STEP, LARGE, SHARED, LARGE_SHARED))
HOSTS = ("hosts", "x DDP", "3.3 M, 2 hosts of 2 ranks, 200 Mbit/s: {}: step")
PEAK = ("memory", "P", "{}: the most in backward")
RESIDENT = ("memory", "MiB", "{}: resident set, 106.8 M parameters, 2 ranks")
#: Of the pictures.
TITLES = {
    "host": "Thousand instructions of the host for a unit of 9 parameters, forward and backward",
    "steps": "Time of a training step, DDP = 1",
    "memory": "Tensors at the peak of a training step, in sizes of all parameters",
}
LARGE_STEPS = rows("a step of 107 M parameters: `fully_shard`, x DDP", *LARGE)
HOST_STEPS = (
    row("a step of 3.3 M, 2 hosts of 2 ranks, 200 Mbit/s between: `fully_shard`, x DDP", *HOSTS, "fully_shard"),
    row("the same, `replicate`", *HOSTS, "replicate"),
)
PEAKS = rows("tensors at the peak of a step, 2 ranks: `fully_shard`, x parameters", *PEAK)
SAME_TITLES = (
    "a step of 26 M parameters, DDP and FSDP2 over our transport too: `fully_shard`, x DDP",
    "a step of 107 M parameters, the same",
    "a step of 26 M parameters through shared memory, the same",
    "a step of 107 M parameters through shared memory, the same",
)
#: What the README calls these.
SUMMARY = (
    "time of a step, x DDP's: `fully_shard`",
    "the same with `reshard_after_forward=False`",
    "the same, `replicate`",
    "time of a step on two hosts, x DDP's: `fully_shard`",
    "the same, `replicate`",
    "tensors at its peak, x all parameters: `fully_shard`",
)
ROWS = (
    *rows("host, a unit of 9 parameters: `fully_shard`, thousand instructions", *HOST),
    *ours("the same, `{}`", *HOST[:2], "C++ fully_shard_{}, 8 blocks of 9", "flat"),
    *(parallel(what) for what in host.PARALLEL.values()),
    *ours(
        "a unit of 9 parameters, `fully_shard`, {}, thousand instructions", "scale", "k instructions a unit",
        "fully_shard, a step: {}", "8 units", "512 units", "64 ranks", "4096 ranks"),
    *ours(
        "set-up of 100 000 tensors, `{}`, s", "scale", "s", "{}, set-up of 100000 tensors", "fully_shard", "replicate"),
    *rows("a step of 26 M parameters, 2 ranks on one host: `fully_shard`, x DDP", *STEP),
    *LARGE_STEPS,
    *rows("a step of 26 M parameters through shared memory: `fully_shard`, x DDP", *SHARED),
    *rows("a step of 107 M parameters through shared memory: `fully_shard`, x DDP", *LARGE_SHARED),
    *(each for title, case in zip(SAME_TITLES, SAME, strict=True) for each in rows(title, *case)),
    *HOST_STEPS,
    *ours(
        "of a wire that is busy for half a step's time, hidden: `{}`, %", "overlap", "%", "{}: hidden, wire busy 50%",
        "fully_shard", "fully_shard_keep", "replicate"),
    *ours(
        "a step of `fully_shard` over such a wire, {} ranks, x what `estimate_time()` says", "overlap",
        "x estimate_time()", "fully_shard: step, {} ranks, wire busy 50%", "2", "4", "8"),
    *(published(*case) for case in PUBLISHED),
    *ours(
        "{} over TCP, 4 ranks, x Gloo's time", "collectives", "x Gloo", "{}, 4 ranks",
        *(f"{operation} of {size}" for operation in collectives.OPERATIONS for size in ("64 kB", "1 MB", "64 MB"))),
    *ours(
        "a rank of a pipeline waits: `{}`, % of a step", "pipeline", "% of a step", "{}: a rank waits",
        "one_forward_one_backward", "interleaved", "zero_bubble_v"),
    *PEAKS,
    row("resident set with 107 M parameters, 2 ranks: `fully_shard`, MiB", *RESIDENT, "fully_shard"),
    row("the same, `replicate`", *RESIDENT, "replicate"),
    Row("a save of 1.2 GB with its AdamW, 2 ranks, GB/s", "checkpoint", "GB/s", saving("save")),
    Row("a step waits for one that is written meanwhile, ms", "checkpoint", "ms", WAITING),
    Row("a load, GB/s", "checkpoint", "GB/s", saving("load")),
)  # fmt: skip


def table(saved: Mapping[str, Saved]) -> Iterator[str]:
    """Lines of Markdown; rows that no saved figure is of are left out."""
    yield f"| | {' | '.join(SIDES)} |"
    yield f"|---|{'---:|' * len(SIDES)}"
    used = []
    for each in ROWS:
        cells = [cell(saved, each, name) for name in each.names]
        if any(cells):
            yield f"| {each.title} | {' | '.join(cells)} |"
            used.append(each.suite)
    yield ""
    for suite in dict.fromkeys(used):
        facts = saved[suite].facts
        shows = f"; [picture](results/{suite}.svg)" if suite in TITLES else ""
        machine = f"{facts['machine']}, torch {facts['torch']}"
        yield f"`{suite}`: {facts['date'][:10]}, commit {facts['commit']}, {machine}{shows}."


def cell(saved: Mapping[str, Saved], each: Row, name: str | None) -> str:
    figure = saved[each.suite].find(name, each.unit) if each.suite in saved and name else None
    return shown(figure.value) if figure else ""


def summary(saved: Mapping[str, Saved]) -> Iterator[str]:
    """Lines of Markdown: time and memory of a step in a few rows, and the conditions."""
    facts = saved["steps"].facts
    yield "| | C++ | Python | torch's engine | DDP |"
    yield "|---|---:|---:|---:|---:|"
    for title, each in zip(SUMMARY, (*LARGE_STEPS, *HOST_STEPS, PEAKS[0]), strict=True):
        yield f"| {title} | {' | '.join(cell(saved, each, name) for name in each.names)} |"
    yield ""
    yield from textwrap.wrap(
        f"A GPT with 107 million parameters, two ranks on one host ({facts['machine']}); less is better. Ours ran over "
        "shardwise's own TCP transport, the others over torch's Gloo. Two hosts: two ranks each, a link of 200 Mbit/s, "
        f"and 3.3 million parameters ({saved['hosts'].facts['date'][:10]}). Measured "
        f"{facts['date'][:10]} with torch {facts['torch']}; [all figures](benchmarks/README.md#saved-figures), "
        "[what a step costs and why](docs/performance.md).",
        width=130, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def columns(first: str, names: Iterable[str]) -> Iterator[str]:
    """The head of a table of numbers."""
    words = list(names)
    yield f"| {first} | {' | '.join(words)} |"
    yield f"|---|{'---:|' * len(words)}"


def taken(of: Saved) -> str:
    return f"{of.facts['date'][:10]}, commit {of.facts['commit']}, {of.facts['machine']}, torch {of.facts['torch']}."


def wrapping(name: str) -> str:
    """What a column calls it."""
    return name.removeprefix("C++ ").replace("fully_shard_keep", "kept")


def spent(saved: Mapping[str, Saved]) -> Iterator[str]:
    """Lines of Markdown: where the time of a step goes, a column for each case of the suite cycles."""
    of = saved["cycles"]
    ways = [(steps.shown_name(name), "shared memory" if shared else "TCP") for name, shared in cycles.CASES]
    yield from columns("milliseconds of a rank", (f"{wrapping(name)}, {way}" for name, way in ways))
    for what in (*(each.name for each in cycles.KINDS), cycles.WAITS, "step"):
        values = [of.find(f"107 M, 2 ranks, {way}: {name}: {what}", cycles.UNIT) for name, way in ways]
        yield f"| {what} | {' | '.join(f'{figure.value:.0f}' if figure else '' for figure in values)} |"
    yield from ("", taken(of))


def charged(saved: Mapping[str, Saved]) -> Iterator[str]:
    """Lines of Markdown: whose instructions a unit's are, a column for each wrapping that the suite host profiles."""
    of = saved["host"]
    yield from columns("thousand instructions", (wrapping(name) for name in host.PROFILED))
    for what in (*(f": {each.name}" for each in host.KINDS), ""):
        values = [of.find(f"{name}, 8 blocks of 9{what}", "k instructions a unit") for name in host.PROFILED]
        numbers = " | ".join(f"{figure.value:.1f}" if figure else "" for figure in values)
        yield f"| {what.removeprefix(': ') or 'a unit of 9 parameters'} | {numbers} |"
    yield from ("", taken(of))


def tcp_floor(saved: Mapping[str, Saved], bytes_more: float, optimizer_less: float) -> float:
    """Of a step over TCP, x DDP's: with that share more of what its bytes cost, and less of its optimizer."""

    def ms(what: str) -> float:
        name = f"107 M, 2 ranks, TCP: {steps.shown_name(steps.DDP_OVER_SHARDWISE)}: {what}"
        return value_of(saved, "cycles", name, cycles.UNIT)

    travels = ms("copies to and from sockets") + ms("messages, and threads that wake")
    return 1 + (bytes_more * travels - optimizer_less * ms("the optimizer")) / ms("step")


def value_of(saved: Mapping[str, Saved], suite: str, name: str, unit: str) -> float:
    figure = saved[suite].find(name, unit)
    if figure is None:
        raise LookupError(f"no figure '{name}' in {unit} was saved for the suite {suite}")
    return figure.value


WRAPS = {"fully_shard": "`fully_shard`", "fully_shard_keep": "kept", "replicate": "`replicate`"}
ALONE = "the model alone in a process, with an optimizer that steps on everything"
#: By wrapping: how many bytes it sends beyond DDP's, how much of DDP's optimizer it has not, and both in words.
OVER_TCP = {
    "fully_shard": (0.5, 0.5, "DDP, with half as many bytes more and half of the optimizer"),
    "fully_shard_keep": (0.0, 0.5, "DDP, with half of the optimizer"),
    "replicate": (0.0, 0.0, "DDP"),
}


def floors(saved: Mapping[str, Saved]) -> Iterator[str]:
    """Lines of Markdown: what was measured beside the least that it could be."""
    yield "| | measured | floor | the floor is |"
    yield "|---|---:|---:|---|"

    def line(title: str, measured: float, floor: float, words: str) -> str:
        return f"| {title} | {shown(measured)} | {shown(floor)} | {words} |"

    for wrap, words in WRAPS.items():
        here = value_of(saved, *LARGE_SHARED[:1], LARGE_SHARED[2].format(f"C++ {wrap}"), LARGE_SHARED[1])
        alone = value_of(saved, *LARGE_SHARED[:1], LARGE_SHARED[2].format("Python none"), LARGE_SHARED[1])
        yield line(f"a step of 107 M through shared memory, x DDP: {words}", here, alone, ALONE)
    for wrap, words in WRAPS.items():
        here = value_of(saved, SAME[1][0], SAME[1][2].format(f"C++ {wrap}"), SAME[1][1])
        *shares, floor = OVER_TCP[wrap]
        title = f"a step of 107 M over TCP, x DDP over our transport: {words}"
        yield line(title, here, tcp_floor(saved, *shares), floor)
    for wrap, words in WRAPS.items():
        figure = saved["memory"].find(PEAK[2].format(f"C++ {wrap}"), PEAK[1])
        if figure and (ratio := re.search(r"([\d.]+) x the formula", figure.note)):
            title = f"tensors at the peak of a step, 2 ranks, x P: {words}"
            yield line(title, figure.value, figure.value / float(ratio[1]), "`estimate_memory()`, no sum late")
    for title, unit, name, floor in (
        ("a save of 1.2 GB, GB/s", "GB/s", "shardwise: save", "a plain write of the same bytes, with fsync"),
        ("a step waits for one, ms", "ms", WAITING[1], "a copy of the same bytes in memory"),
    ):
        yield line(title, value_of(saved, "checkpoint", name, unit), value_of(saved, "checkpoint", floor, unit), floor)


def replaced(path: Path, *blocks: Iterable[str]) -> str:
    """A page with these lines between its marks, block after block."""
    rest = path.read_text()
    text = ""
    for lines in blocks:
        before, _, rest = rest.partition(BEGIN)
        _, _, rest = rest.partition(END)
        text += "\n".join([f"{before}{BEGIN}", *lines, END])
    return text + rest


def label(name: str) -> str:
    """Whose figure it is, without what all bars of a picture have in common."""
    for common in (", 8 blocks of 9", ", 2 ranks", ": step", ": the most in backward"):
        name = name.replace(common, "")
    return name.replace("_keep", ", kept").replace("FSDP2 kept", "FSDP2, kept")


def pictures(saved: Mapping[str, Saved]) -> dict[str, str]:
    """By file name, SVG: a bar for each figure that the table has beside DDP's."""
    result = {}
    for suite in TITLES:
        rows = [each for each in ROWS if each.suite == suite and suite in saved and each.names[-1]]
        bars = [
            Bar(label(name), figure.value, ours="C++" in name or "Python" in name)
            for each in rows
            if each.unit == rows[0].unit
            for name in each.names
            if name and (figure := saved[suite].find(name, each.unit))
        ]
        if bars:
            facts = saved[suite].facts
            words = f"{TITLES[suite]} ({facts['date'][:10]}, {facts['commit']})"
            result[f"{suite}.svg"] = picture(words, list(dict.fromkeys(bars)))
    return result


def wanted(results: Path = RESULTS) -> dict[Path, str]:
    saved = load(results)
    return {
        README: replaced(README, summary(saved)),
        TABLE: replaced(TABLE, table(saved)),
        PERFORMANCE: replaced(PERFORMANCE, charged(saved), floors(saved), spent(saved)),
        **{results / name: text for name, text in pictures(saved).items()},
    }


def stale(files: Mapping[Path, str]) -> Sequence[Path]:
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    files = wanted()
    old = stale(files)
    if options.check:
        print("\n".join(f"{path} is not what benchmarks/report.py makes of the saved figures" for path in old))
        return int(bool(old))
    for path in old:
        path.write_text(files[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
