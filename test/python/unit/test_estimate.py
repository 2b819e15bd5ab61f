"""estimate_memory(), estimate_time() and `python -m shardwise estimate`: what they say and refuse."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from checkout import ROOT, python
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardwise
from shardwise.__main__ import main

MODEL = "examples/python/model.py:Gpt"


def layers(number: int = 3) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(number)))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "shardwise", "estimate", *words)


def test_a_rank_has_its_part_of_parameters_optimizer_and_gradients() -> None:
    model = layers()
    whole = 3 * 64 * 64 * 4
    estimate = shardwise.estimate_memory(model, 4, units=list(model))
    assert estimate.parameters == whole // 4
    assert estimate.optimizer == 2 * whole // 4
    # And a count of used ranks for each parameter, behind parts that are aligned.
    assert estimate.gradients == whole // 4 + 3 * 128
    copies = shardwise.estimate_memory(model, 4, policy="replicate", units=list(model))
    assert (copies.parameters, copies.optimizer, copies.pool) == (whole, 2 * whole, 0)
    assert shardwise.estimate_memory(model, 4, units=list(model), optimizer_factor=0).optimizer == 0
    # Means and variances, and a count of 64 bits.
    assert shardwise.estimate_memory(nn.BatchNorm1d(8, device="meta"), 4).buffers == 2 * 8 * 4 + 8


def test_options_change_what_they_should() -> None:
    model = layers(8)
    plain = shardwise.estimate_memory(model, 2, units=list(model))
    kept = shardwise.estimate_memory(model, 2, units=list(model), reshard_after_forward=False)
    assert kept.backward_peak > plain.backward_peak + 64 * 64 * 4
    half = shardwise.estimate_memory(
        model, 2, units=list(model), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    assert half.unsummed_gradients == plain.unsummed_gradients // 2
    assert half.parameters == plain.parameters
    assert shardwise.estimate_memory(model, 4, copies=2).parameters == shardwise.estimate_memory(model, 2).parameters
    ignored = shardwise.estimate_memory(model, 2, ignored_params={model[0].weight})
    assert ignored.parameters == plain.parameters * 7 // 8
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    assert shardwise.estimate_memory(model, 2, units=list(model)).optimizer == plain.optimizer // 2


def test_padding_follows_the_dimension() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 3, bias=False)
    rows = shardwise.estimate_memory(model, 2)
    columns = shardwise.estimate_memory(model, 2, shard_placement_fn=lambda _: Shard(-1))
    assert rows.parameters > columns.parameters == 64 * 3 * 4 // 2


def test_what_is_wrong_is_named() -> None:
    model = layers()
    with pytest.raises(ValueError, match="4 ranks and 3 copies of each shard; .* must divide the number of ranks"):
        shardwise.estimate_memory(model, 4, copies=3)
    with pytest.raises(ValueError, match="rank is 4, but 4 ranks hold different shards; it must be from 0 to 3"):
        shardwise.estimate_memory(model, 4, rank=4)
    with pytest.raises(ValueError, match="a module in units does not lie below this Sequential"):
        shardwise.estimate_memory(model, 4, units=[nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="knows the policies 'fully_shard' and 'replicate', not 'ddp'"):
        shardwise.estimate_memory(model, 4, policy="ddp")  # type: ignore[arg-type]


def test_time_follows_links_and_what_is_computed() -> None:
    model = layers(2)
    whole = 2 * 64 * 64 * 4
    link = shardwise.Link(1e6)
    # Nothing to compute hides behind the wire: three passes of half of the parameters.
    only = shardwise.estimate_time(model, 2, link=link, compute=0, units=list(model))
    assert only.step == only.wire == pytest.approx(3 * whole / 2 / 1e6, rel=0.05)
    both = shardwise.estimate_time(model, 2, link=link, compute=1, units=list(model))
    assert (both.compute, both.wire) == (1, only.wire)
    assert 1 < both.step < 1 + both.wire
    kept = shardwise.estimate_time(model, 2, link=link, compute=1, units=list(model), reshard_after_forward=False)
    assert kept.wire == pytest.approx(both.wire * 2 / 3, rel=0.05)
    copies = shardwise.estimate_time(model, 2, link=link, compute=1, policy="replicate", units=list(model))
    assert copies.wire == pytest.approx(whole / 1e6, rel=0.05)
    hosts = shardwise.estimate_time(
        model, 4, link=shardwise.Link(1e9), between=link, ranks_per_host=2, compute=0, units=list(model)
    )
    assert hosts.wire == pytest.approx(3 * whole / 2 / 1e6, rel=0.05)
    # An embedding is looked up: the first layer's gather has nothing to hide behind.
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    table = shardwise.estimate_time(model, 2, link=link, compute=1, units=list(model))
    assert table.step > both.step
    # But not if another module computes with its weight.
    with torch.device("meta"):
        model.append(nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    tied = shardwise.estimate_time(model, 2, link=link, compute=1, units=list(model)[:2])
    assert tied.step == pytest.approx(both.step, rel=0.01)


def test_times_that_cannot_be_are_named() -> None:
    model = layers()
    with pytest.raises(ValueError, match="the bandwidth between hosts is 0; it must be positive"):
        shardwise.estimate_time(model, 4, link=shardwise.Link(1e9), ranks_per_host=2, compute=1)
    with pytest.raises(ValueError, match="the time to compute is -1; it must be 0 or more"):
        shardwise.estimate_time(model, 4, link=shardwise.Link(1e9), compute=-1)
    with pytest.raises(TypeError, match="unit"):
        shardwise.estimate_time(model, 4, link=shardwise.Link(1e9), compute=1, unit=[])


def run_here(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """What the command returns, in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["shardwise", "estimate", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        return main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def test_the_command_prints_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [MODEL, "--world", "8", "--units", "blocks.*", "--link", "2G,20e-6"]
    assert run_here([*words, "--compute", "0.5", "--json"], monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["compute"] == 0.5
    assert said["step"] > 0.5
    assert said["forward_peak"] > 0
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "python"))
    from model import Gpt

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Gpt().parameters())
    assert run_here([*words, "--tokens", "1K", "--flops", "1T"], monkeypatch) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("computes")]
    assert float(line.split()[1]) == pytest.approx(6 * count * 1e3 / 1e12 * 1e3, abs=0.01)
    assert run_here(words, monkeypatch) == 1
    assert "--link needs what a step computes: give --compute, or --tokens and --flops" in capsys.readouterr().err


def test_the_command_prints_the_same() -> None:
    done = command(MODEL, "--world", "8", "--units", "blocks.*", "--param-dtype", "bfloat16", "--json")
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(ROOT / "examples" / "python"))
    from model import Gpt

    with torch.device("meta"):
        model = Gpt()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = shardwise.estimate_memory(model, 8, units=list(model.blocks), mp_policy=policy)
    assert json.loads(done.stdout) == json.loads(expected.json())
    table = command(MODEL, "--world", "8", "--policy", "replicate").stdout
    lines = dict(line.split("  ", 1) for line in table.splitlines() if line)
    assert {"parameters", "optimizer", "peak in backward", "after the step"} <= set(lines)
    # The largest has the longest bar.
    assert lines["peak in backward"].endswith("  " + 32 * "#")
    assert 0 < lines["parameters"].count("#") < 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([MODEL, "--world", "8", "--units", "layers.*"], "no module of Gpt has a name like 'layers.*'"),
        ([MODEL, "--world", "9", "--copies", "2"], "must divide the number of ranks"),
        (["examples/python/model.py:nothing", "--world", "2"], "there is no function 'nothing' in examples"),
        (["nowhere.py:make", "--world", "2"], "there is no file nowhere.py"),
        (["nowhere:make", "--world", "2"], "No module named 'nowhere'"),
        (["model", "--world", "2"], "names no function"),
        (["examples/python/model.py:GptOptions", "--world", "2"], "must return an nn.Module"),
        ([MODEL, "--world", "2", "--param-dtype", "float5"], "'float5' is not a dtype"),
        ([MODEL, "--world", "2", "--reshard", "maybe"], "neither yes nor no nor a number"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(words, monkeypatch) != 0
    assert said in capsys.readouterr().err
