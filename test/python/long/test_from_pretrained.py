"""Hugging Face's from_pretrained() loads a merged checkpoint, and ranks load a folder of Hugging Face's by slices."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import PACKAGES, output_of, python, torchrun

#: What the test was written for; newer ones may do as well.
TRANSFORMERS = "transformers==5.24.0"

TRAIN = """
import sys
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
import shardwise
from shardwise import checkpoint

out = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=32))
for block in model.transformer.h:
    shardwise.fully_shard(block)
shardwise.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.randint(0, 101, (2, 16))
for _ in range(2):
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
checkpoint.save(f"{out}/step-2", model, optimizer)
model.eval()
with torch.no_grad():
    scores = model(torch.arange(16)[None]).logits
if dist.get_rank() == 0:
    torch.save(scores, f"{out}/scores.pt")
    model.config.save_pretrained(f"{out}/config")
dist.destroy_process_group()
"""

LOAD = """
import sys
import torch
from transformers import GPT2LMHeadModel

out = sys.argv[1]
model, report = GPT2LMHeadModel.from_pretrained(f"{out}/merged", output_loading_info=True)
assert not report["missing_keys"] and not report["mismatched_keys"], report
model.eval()
with torch.no_grad():
    assert torch.equal(model(torch.arange(16)[None]).logits, torch.load(f"{out}/scores.pt"))
print("the same")
"""

SAVE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

out, tied = sys.argv[1], sys.argv[2] == "tied"
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=101)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied))
model.save_pretrained(f"{out}/saved", max_shard_size="100KB")
with torch.no_grad():
    torch.save(model.eval()(torch.arange(16)[None]).logits, f"{out}/scores.pt")
"""

LOAD_SLICES = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
import shardwise
from shardwise import checkpoint

out = sys.argv[1]
dist.init_process_group("gloo")
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{out}/saved"))
for layer in model.model.layers:
    shardwise.fully_shard(layer)
shardwise.fully_shard(model)
model.to_empty(device="cpu")
checkpoint.load(f"{out}/saved", model)
for module in model.modules():
    module._is_hf_initialized = False
for tensor in model.state_dict(keep_vars=True).values():
    tensor._is_hf_initialized = True
model.initialize_weights()
with torch.no_grad():
    assert torch.equal(model.eval()(torch.arange(16)[None]).logits, torch.load(f"{out}/scores.pt"))
print("the same")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables, by which Python has transformers."""
    packages = tmp_path_factory.mktemp("packages")
    done = python("-m", "pip", "install", "--quiet", "--target", packages, TRANSFORMERS)
    if done.returncode != 0:
        pytest.skip(f"{TRANSFORMERS} cannot be installed here: {done.stderr.strip()[-200:]}")
    return {"PYTHONPATH": f"{PACKAGES}:{packages}", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("size", ["5", "0.00005"], ids=["one file", "several files"])
def test_from_pretrained(size: str, environment: dict[str, str], tmp_path: Path) -> None:
    for name, text in (("train.py", TRAIN), ("load.py", LOAD)):
        (tmp_path / name).write_text(text)
    torchrun(2, tmp_path / "train.py", tmp_path, **environment)
    merge = ("--merge", tmp_path / "merged", "--file-size", size)
    files = output_of("-m", "shardwise", "checkpoint", tmp_path, *merge, **environment).splitlines()
    assert (len(files) == 1) == (size == "5")
    (tmp_path / "config" / "config.json").rename(tmp_path / "merged" / "config.json")
    assert output_of(tmp_path / "load.py", tmp_path, **environment).endswith("the same\n")


@pytest.mark.parametrize("tied", ["tied", "not tied"])
def test_a_model_on_meta_loads_by_slices(tied: str, environment: dict[str, str], tmp_path: Path) -> None:
    for name, text in (("save.py", SAVE), ("load.py", LOAD_SLICES)):
        (tmp_path / name).write_text(text)
    output_of(tmp_path / "save.py", tmp_path, tied, **environment)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    assert torchrun(2, tmp_path / "load.py", tmp_path, **environment).count("the same") == 2
