"""Sharded checkpoints: each rank writes and reads its own part, and any number of ranks can load them.

>>> from shardwise import checkpoint
>>> checkpoint.save("run/step-100", model, optimizer, values={"step": 100})
>>> step = checkpoint.load("run/step-100", model, optimizer).values["step"]

They are safetensors files, which torch.distributed.checkpoint and Hugging Face's libraries can read. C++ programs save
and load the same ones: see docs/checkpoints.md.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from shardwise import _C
from shardwise._cpp_modules import is_cpp
from shardwise._meshes import device_mesh_of, device_of, engine_mesh
from shardwise._saved_optimizer import PREFIX as OPTIMIZER
from shardwise._saved_optimizer import SavedOptimizer
from shardwise._saved_tensors import Pieces, Saved, local_of

T = TypeVar("T")
Path = str | PathLike[str]

#: Before the names of the program's own tensors.
PROGRAM = "program."
#: What torch's wrappers add to names, and its own tools for state dicts take out.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass
class Loaded:
    """What load() found beside the model.

    >>> loaded = checkpoint.load(folder, model)
    >>> loaded.values["step"], loaded.tensors["generator"]
    """

    values: dict[str, Any] = field(default_factory=dict)
    #: The program's tensors, whole and on the host, except for those that load() set in place.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Names that only the model, the optimizer or the given tensors have, and names that only the checkpoint has.
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    #: Whether another program wrote the folder, which then has no checksums to verify.
    unverified: bool = False


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint.

    >>> newest = checkpoint.newest_step("run")
    >>> newest.step, newest.folder
    """

    step: int
    folder: str


def save(
    folder: Path,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves a model to a folder that all ranks can reach. Each rank writes its part.

    The checkpoint appears at `folder` in one step, once all of it will survive a loss of power, and replaces an earlier
    one. If the save fails on one rank, it raises on all of them, and the earlier checkpoint stays. One rank writes a
    tensor that every rank has whole.

    All ranks must call it, outside of a backward.

    Args:
        model: any module: wrapped or not, also with tensor-parallel DTensors. The call saves its state_dict().
        optimizer: its state and its options are saved too, under the names of its parameters.
        values: numbers, strings, bools, and lists of these; the same on all ranks.
        tensors: the program's own tensors, also DTensors, such as averages of the parameters. Ranks that use the same
            name must give the same tensor.
        process_group: the ranks that save together. Default: all of them.

    >>> checkpoint.save(checkpoint.step_folder("run", 100), model, optimizer, values={"step": 100})
    """
    ranks = _ranks(_mesh(process_group), "save")
    place = _together(ranks, lambda: _place(folder))
    pieces, about = _together(ranks, lambda: _pieces(model, optimizer, values or {}, tensors or {}))
    _C.save_pieces(ranks, place, pieces, about)


class AsyncSaver:
    """Saves while training goes on: save() copies this rank's part and returns, and a thread writes it.

    One save is under way at a time. The next one first waits for it, raises its error if it failed, and uses its memory
    again, which is as large as this rank's part. All ranks must make the same calls in the same order. If a program
    ends without wait() and its last save fails, stderr says so, and the process exits with an error.

    >>> saver = checkpoint.AsyncSaver()
    >>> saver.save(checkpoint.step_folder("run", step), model, optimizer, values={"step": step})
    >>> saver.wait()  # at the end
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._background = _C.BackgroundSave()
        # Also when the interpreter ends.
        weakref.finalize(self, self._background.finish)

    def save(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: optim.Optimizer | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Like checkpoint.save(). Raises the errors that are known before anything is written.

        >>> saver.save("run/step-100", model, optimizer)
        """
        mesh = _mesh(self._group)
        ranks = _ranks(mesh, "save")
        place = _together(ranks, lambda: _place(folder))
        beside = _C.Ranks.beside(mesh) if mesh is not None else _C.Ranks()
        pieces, about = _together(ranks, lambda: _pieces(model, optimizer, values or {}, tensors or {}))
        self._background.begin(ranks, beside, place, pieces, about)

    def wait(self) -> None:
        """Returns once the last checkpoint will survive a loss of power. Raises the error of its save, once.

        >>> saver.wait()
        """
        self._background.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, so that wait() would wait.

        >>> saver.is_saving
        """
        return self._background.is_under_way


def load(
    folder: Path,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    strict: bool = True,
    allow_unverified: bool = True,
    entry: str = "",
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads a checkpoint into a model in place, whatever ranks saved it and however they divided it.

    It reads checkpoints of save(), of C++ programs, of torch.distributed.checkpoint's HuggingFaceStorageWriter and of
    Hugging Face's libraries (safetensors or pytorch_model.bin). `folder` may also be one file: of safetensors, or of
    torch.save(model.state_dict(), file), of which it unpickles nothing. Each rank reads only what it needs, and
    verifies it if shardwise wrote it. The call checks names, shapes and dtypes before it changes anything. If it fails
    on one rank, it raises on all of them. If the error says that data is not what was saved, the model has a mix of old
    and new values: load another checkpoint.

    All ranks must call it, outside of a backward.

    Args:
        model: its parameters stay the same objects. A model made on the meta device needs to_empty() first.
        optimizer: its state and its options are set too. Options for how a step is computed, such as `fused`, stay.
        tensors: tensors of the program to set in place, under the names that save() got. Others are returned.
        strict: whether names that only the model or only the checkpoint has are an Error. If not, they are returned.
        allow_unverified: whether a folder of another program, which has no checksums, is loaded too. If not, it is an
            Error.
        entry: of a file of torch.save() that has more than a state dict, the name of the model's, as in
            {"model": model.state_dict(), "epoch": 3}. Its numbers and texts are the values then.
        process_group: as for save().

    >>> checkpoint.load(checkpoint.newest_step("run").folder, model, optimizer).values["step"]
    """
    ranks = _ranks(_mesh(process_group), "load")
    saved = _C.SavedFolder.on_all_ranks(ranks, _together(ranks, lambda: _place(folder)), entry)
    loading = _together(ranks, lambda: _Loading(saved, model, optimizer, tensors or {}))
    _C.check_pieces(ranks, [piece for piece, _ in loading.targets])
    # Ranks may have parts of a model, such as stages of a pipeline: what none of them has is unexpected.
    told = [set(json.loads(text)) for text in ranks.together(lambda: json.dumps(loading.loaded.unexpected))]
    loading.loaded.unexpected = [name for name in loading.loaded.unexpected if all(name in names for names in told)]
    _together(ranks, lambda: loading.check(strict, allow_unverified))
    return _together(ranks, loading.read)


def export_safetensors(file: Path, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
    """Writes a model's tensors, whole, to one safetensors file, as Hugging Face's libraries and others read it.

    load() accepts the folder of a model.safetensors. For several files, save the model and run `python -m shardwise
    checkpoint FOLDER --merge NEW`. The file appears once it is complete, and replaces an earlier one. The first rank
    writes it and needs memory for all of it. All ranks must call it, outside of a backward.

    Args:
        model: any module, as for save(), but not one that is divided into stages.
        process_group: as for save().

    >>> checkpoint.export_safetensors("model.safetensors", model)
    """
    ranks = _ranks(_mesh(process_group), "export_safetensors")
    place = _together(ranks, lambda: _place(file))
    _C.check_export(ranks, place)
    entries = _together(ranks, lambda: _entries(model))
    _C.check_pieces(ranks, _together(ranks, lambda: _pieces(model, None, {}, {})[0]))
    for rank, text in enumerate(ranks.together(lambda: json.dumps(list(entries)))):
        if others := set(json.loads(text)) ^ set(entries):
            raise _C.Error(
                f"shardwise: '{min(others)}' is not on each of the ranks {ranks.rank} and {rank}, so that none has the "
                "whole model to write to one file. Save it, and merge it with python -m shardwise checkpoint FOLDER "
                "--merge NEW."
            )
    whole = {}
    for name, tensor in entries.items():
        value = _whole(tensor)
        if ranks.rank == 0:
            whole[name] = value.cpu()
    _C.export_tensors(ranks, place, whole)


def step_folder(root: Path, step: int) -> str:
    """Returns the folder for the checkpoint of a step: ROOT/step-100.

    >>> checkpoint.save(checkpoint.step_folder("run", 100), model)
    """
    return _C.step_folder(_place(root), step)


def newest_step(root: Path) -> SavedStep | None:
    """Returns the complete checkpoint of the highest step, or None. Interrupted saves do not count.

    >>> newest = checkpoint.newest_step("run")
    """
    found = _C.newest_step(_place(root))
    return SavedStep(*found) if found else None


def keep_newest_steps(root: Path, count: int) -> list[str]:
    """Removes complete checkpoints until the `count` newest are left, and returns the folders that it removed.

    Call it on one rank, after save().

    >>> if dist.get_rank() == 0:
    ...     checkpoint.keep_newest_steps("run", 3)
    """
    return _C.keep_newest_steps(_place(root), count)


class _Loading:
    """What a checkpoint brings to this rank: first compared, then read."""

    def __init__(
        self,
        folder: _C.SavedFolder,
        model: nn.Module,
        optimizer: optim.Optimizer | None,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self.saved = Saved(folder)
        self.loaded = Loaded(unverified=folder.world is None)
        self.make = Pieces()
        self.wrong: list[str] = []
        #: What is read in place, by name in the checkpoint.
        self.targets: list[tuple[_C.Piece, torch.Tensor]] = []
        entries = _entries(model)
        self.program = {f"{PROGRAM}{name}": tensor for name, tensor in tensors.items()}
        self._match(entries, self.program)
        self.optimizer = SavedOptimizer(optimizer, _names(entries), self.make) if optimizer is not None else None
        known = {*entries, *self.program}
        if self.optimizer is not None:
            fitting, missing, wrong = self.optimizer.fit(self.saved)
            known |= fitting
            self.loaded.missing += missing
            self.wrong += wrong
        others = (PROGRAM,) if self.optimizer is not None else (PROGRAM, OPTIMIZER)
        self.loaded.unexpected = [
            name
            for name in [*self.saved.tensors, *self.saved.unknown]
            if name not in known and (name in self.saved.unknown or not name.startswith(others))
        ]

    def _match(self, *groups: Mapping[str, torch.Tensor]) -> None:
        for entries in groups:
            there = {*self.saved.tensors, *self.saved.unknown}
            found = {id(tensor) for name, tensor in entries.items() if name in there}
            # A tensor that has several names needs one of them.
            self.loaded.missing += [n for n, tensor in entries.items() if n not in there and id(tensor) not in found]
            for name, tensor in entries.items():
                piece = self.make.of(name, tensor)
                self.targets += [(piece, local_of(name, tensor))]
                if name in self.saved.tensors and (reason := _why_not(tensor, *self.saved.tensors[name])):
                    self.wrong.append(f"'{name}' {reason}")
                if dtype := self.saved.unknown.get(name):
                    self.wrong.append(f"'{name}' has the dtype {dtype} there, which torch does not have")

    def check(self, strict: bool, allow_unverified: bool) -> None:
        """Raises Error if the checkpoint does not fit."""
        if self.loaded.unverified and not allow_unverified:
            raise _C.Error(
                f"shardwise: {self.saved.path} has no shardwise.json: another program wrote it, so that nothing of it "
                "can be verified, and allow_unverified=False refuses that. Load a checkpoint that shardwise saved, or "
                "allow it."
            )
        lines = [("do not fit", self.wrong)]
        if strict:
            lines[:0] = [
                ("missing in the checkpoint", self.loaded.missing),
                ("neither in the model nor in the optimizer", self.loaded.unexpected),
            ]
        text = "".join(f"\n  {title}: {', '.join(names)}" for title, names in lines if names)
        if text:
            raise _C.Error(
                f"shardwise: the checkpoint {self.saved.path} does not fit, and nothing was loaded:{text}\n"
                "Give the model, and an optimizer of the class, that were saved"
                + (", or strict=False to load the names that both have." if strict else ".")
            )

    def read(self) -> Loaded:
        with torch.no_grad():
            for piece, target in self.targets:
                if piece.name in self.saved.tensors:
                    target.copy_(self.saved.folder.read_piece(piece))
        if self.optimizer is not None:
            self.optimizer.read(self.saved)
        for name in self.saved.tensors:
            if name.startswith(PROGRAM):
                value = self.program.get(name)
                self.loaded.tensors[name.removeprefix(PROGRAM)] = self.saved.read(name) if value is None else value
        values = self.saved.values
        self.loaded.values = {name: value for name, value in values.items() if not name.startswith(OPTIMIZER)}
        return self.loaded


def _pieces(
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[_C.Piece], dict[str, Any]]:
    entries = _entries(model)
    make = Pieces()
    pieces = [make.of(name, tensor, isinstance(tensor, nn.Parameter)) for name, tensor in entries.items()]
    about = dict(values)
    for name in [*entries, *tensors]:
        _check_name(name)
    for name in [*entries, *about]:
        if str(name).startswith((OPTIMIZER, PROGRAM)):
            raise ValueError(
                f"shardwise: '{name}' cannot be told from what else a checkpoint has, since names with '{OPTIMIZER}' "
                f"and '{PROGRAM}' are for that. Rename it."
            )
    if optimizer is not None:
        kept, others = SavedOptimizer(optimizer, _names(entries), make).pieces()
        pieces += kept
        about |= others
    return pieces + [make.of(f"{PROGRAM}{name}", tensor, must_agree=True) for name, tensor in tensors.items()], about


def _entries(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model has, by the names that it has without torch's wrappers."""
    if is_cpp(model):
        raise ValueError(
            "shardwise: this is a C++ module: save and load it in C++, with shardwise::save() and shardwise::load(); "
            "the checkpoints are the same."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"shardwise: model must be a torch.nn.Module, not {model!r:.200}.")
    entries = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            raise ValueError(
                f"shardwise: '{name}' cannot be part of a checkpoint: it is extra state of a module, which can only be "
                "set through the module. Save it with values={...} or tensors={...}."
            )
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        entries[name] = value
    return entries


def _names(entries: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """The first name of each."""
    return {id(tensor): name for name, tensor in reversed(list(entries.items()))}


def _why_not(tensor: torch.Tensor, dtype: torch.dtype, sizes: list[int]) -> str:
    if list(tensor.shape) != sizes:
        return f"has shape {list(tensor.shape)} here and {sizes} there"
    if tensor.dtype == dtype:
        return ""
    return f"is {_word(tensor.dtype)} here and {_word(dtype)} there: cast the model before it is wrapped"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(path: Path) -> str:
    text = os.fsdecode(path)
    if not _is_utf8(text):
        raise ValueError(f"shardwise: the path {text!r} is not valid UTF-8. Name another one.")
    return text


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _is_utf8(name):
        raise ValueError(
            f"shardwise: the name of a tensor {name!r:.80} cannot be saved: it must be a text, without lone surrogates."
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(tensor: Any) -> torch.Tensor:
    """Of what lies on several ranks: gathered where its mesh is, for it may be kept on the host."""
    with torch.no_grad():
        moved: Any = tensor.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor
        whole: torch.Tensor = moved.full_tensor() if isinstance(moved, DTensor) else moved.detach()
    return whole


def _mesh(group: dist.ProcessGroup | None) -> _C.Mesh | None:
    """Of the ranks of a group; None for one that is alone."""
    if group is None and not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    assert group is not None
    return engine_mesh(device_mesh_of(group, replicates=False), replicates=False, device=device_of(group))


def _ranks(mesh: _C.Mesh | None, function: str) -> _C.Ranks:
    world = os.environ.get("WORLD_SIZE", "")
    if mesh is None and function == "save" and world.isdigit() and int(world) > 1:
        raise ValueError(
            f"shardwise: save(): the program has {world} ranks (WORLD_SIZE), and no process group says which of them "
            "save together: they would write over each other. Call torch.distributed.init_process_group() first."
        )
    return _C.Ranks(mesh, function) if mesh is not None else _C.Ranks()


def _together(ranks: _C.Ranks, act: Callable[[], T]) -> T:
    """Runs what may fail on any rank; if it does on one, it raises on all."""
    results: list[T] = []
    ranks.together(lambda: results.append(act()))
    return results[0]


__all__ = [
    "AsyncSaver",
    "Loaded",
    "SavedStep",
    "export_safetensors",
    "keep_newest_steps",
    "load",
    "newest_step",
    "save",
    "step_folder",
]
