"""The suite `gpu`, in small: on GPUs where there are some; what does not need one, on the CPU."""

from __future__ import annotations

import gpu
import pytest
import torch
from checkout import BUILD
from steps import Size

EXTENT = gpu.Extent(Size(2, 96, 2, world=1, rounds=2, steps=2), batch=2, length=16, device="cpu")


def test_without_a_gpu_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu.Gpus, "found", lambda: gpu.Gpus(0))
    assert list(gpu.suite(BUILD, full=False)) == []
    assert capsys.readouterr().out == "gpu  nothing was measured: torch finds no GPU here\n"


def test_one_rank_beside_ddp():
    with gpu.programs_of(BUILD, EXTENT, 1, ("Python ddp", "C++ fully_shard", "Python none")) as programs:
        gpu.take_turns(programs, 2, 2)
        found = {figure.name: figure for figure in gpu.turns_figures(programs, "1 rank")}
    assert found["0 M, 1 rank: DDP: step"].value == 1
    for name in ("C++ fully_shard", "Python none"):
        assert found[f"0 M, 1 rank: {name}: step"].unit == "x DDP"
        assert found[f"0 M, 1 rank: {name}: tensors at the peak"].value >= 4
    # The host waits for nothing that is done here: what is given to the CPU is done.
    for program in programs:
        for answers in program.rounds:
            for whole, host in zip(answers[0]["seconds"], answers[0]["host_seconds"], strict=True):
                assert 0 < host <= whole


def test_a_step_takes_no_less_than_the_modelled_wire():
    link = gpu.Link(8, microseconds=100, megabytes=20)
    names = ("Python ddp", "Python fully_shard", "Python fsdp2", "Python replicate")
    with gpu.programs_of(BUILD, EXTENT, link.world, names, modelled=True) as programs:
        for program in programs:
            program.ask(f"speed {link.microseconds} {link.megabytes}")
        gpu.take_turns(programs, 1, 2)
        found = {
            figure.name.removeprefix("0 M, 8 modelled ranks, "): figure for figure in gpu.link_figures(programs, link)
        }
    answers = {program.name: program.rounds[0][0] for program in programs}
    for answer in answers.values():
        assert min(answer["seconds"]) >= 0.99 * answer["busy_seconds"]
    # Two passes and a sum; the outermost unit's parameters are gathered once.
    seconds = 7 / 8 * answers["Python ddp"]["parameter_bytes"] / (1e6 * link.megabytes)
    busy = {name: answer["busy_seconds"] for name, answer in answers.items()}
    assert 2 * seconds < busy["Python fully_shard"] < 3.1 * seconds + 0.002
    assert busy["Python fully_shard"] == pytest.approx(busy["Python fsdp2"], rel=0.02)
    assert busy["Python replicate"] == pytest.approx(busy["Python ddp"], rel=0.02)
    assert found["0.02 GB/s: DDP: step"].value == 1
    assert "the wire busy for" in found["0.02 GB/s: Python replicate: step"].note


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the suite gpu needs a GPU")
def test_steps_on_gpus():
    found = {figure.name: figure for figure in gpu.suite(BUILD, full=False)}
    link = str(gpu.LINKS[0])
    for name in ("Python fully_shard", "Python fully_shard_keep", "FSDP2", "FSDP2 kept"):
        of_wrap = {text.rpartition(": ")[2]: figure for text, figure in found.items() if f"{link}: {name}: " in text}
        assert of_wrap["step"].unit == "x FSDP2"
        assert of_wrap["step"].value > 0
        assert of_wrap["tensors at the peak"].value > 0
