"""What the Python package does itself."""

from __future__ import annotations

from mutant import python_mutants

_mutant = python_mutants("python/shardwise")

PACKAGE = [
    _mutant(
        "add gradients up along the axes for data before the unit does",
        "_specs.py",
        "given if axis in self._data_axes and given.is_partial() else wanted",
        "wanted",
        "ranks/test_mesh_dims.py",
    ),
    _mutant(
        "take a plain gradient that is annotated for all of a sum",
        "_specs.py",
        "if isinstance(gradient, DTensor) else self._given",
        "if isinstance(gradient, DTensor) else None",
        "ranks/test_mesh_dims.py",
    ),
    _mutant(
        "step without the program's closure",
        "_automatic_steps.py",
        "loss = None if closure is None else closure()",
        "loss = None",
        "interop/test_automatic_steps.py",
    ),
    _mutant(
        "make process groups anew for each model that comes when none is there",
        "_meshes.py",
        "made = _meshes.setdefault(groups[0], {})",
        "made: dict[Any, _C.Mesh] = {}",
        "interop/test_interop_meshes.py",
    ),
    _mutant(
        "take the forwards of all ranks for a rank's steps",
        "_timeline.py",
        'event.kind == "forward" and event.rank == rank',
        'event.kind == "forward"',
        "unit/test_timeline.py ranks/test_record.py",
    ),
    _mutant(
        "draw one step too many",
        "_timeline.py",
        "begins[-number] if len(begins) > number",
        "begins[-number - 1] if len(begins) > number",
        "unit/test_timeline.py",
    ),
    _mutant(
        "leave forwards as long as they were written down",
        "_record_files.py",
        "event = replace(event, end=min(event.end, backwards.get(event.rank, event.end)))",
        "event = replace(event)",
        "unit/test_timeline.py",
    ),
    _mutant(
        "put spans that cross into one row of the trace",
        "_chrome_trace.py",
        "if not open_ends or event.end <= open_ends[-1]",
        "if open_ends is not None",
        "unit/test_timeline.py",
    ),
    _mutant(
        "count time twice where events overlap",
        "_timeline.py",
        "event.end - max(event.begin, until)",
        "event.end - event.begin",
        "unit/test_timeline.py",
    ),
    _mutant(
        "take all that travels for hidden",
        "_timeline.py",
        "max(0.0, 1 - waited / wire) if wire",
        "1.0 if wire",
        "unit/test_timeline.py",
    ),
    _mutant(
        "name the records of all ranks by rank 0",
        "_record.py",
        "os.fspath(folder), _rank())",
        "os.fspath(folder), 0)",
        "ranks/test_record.py",
    ),
    _mutant(
        "estimate buffers as nothing",
        "_estimate.py",
        "buffer_bytes=sum(buffer.nbytes for buffer in module.buffers())",
        "buffer_bytes=0",
        "unit/test_estimate.py",
    ),
    _mutant(
        "estimate frozen parameters as trained ones",
        "_estimate.py",
        "trained=parameter.requires_grad",
        "trained=True",
        "unit/test_estimate.py ranks/test_estimate_measured.py",
    ),
    _mutant(
        "estimate as if the dimension were always the first",
        "_estimate.py",
        'dim=chosen_dim(shard_placement_fn, parameter, name, "estimate_memory()") or 0',
        "dim=0",
        "unit/test_estimate.py ranks/test_estimate_measured.py",
    ),
    _mutant(
        "log no backward that begins",
        "_logs.py",
        '            self._say("pre_backward")\n',
        "",
        "ranks/test_logs.py",
    ),
    _mutant(
        "log although nobody listens",
        "_logs.py",
        "return Log(state) if _logger.isEnabledFor(logging.DEBUG) else None",
        "return Log(state)",
        "ranks/test_logs.py",
    ),
    _mutant(
        "leave the inputs of modules as they are",
        "_conversions.py",
        "    return convert if inputs else None, outputs\n",
        "    return None, outputs\n",
        "interop/test_interop_lists.py",
    ),
    _mutant(
        "leave all-reduces on when synchronisation is off",
        "_gradient_methods.py",
        "            unit.set_requires_gradient_sync(requires_gradient_sync)\n"
        "            unit.set_requires_all_reduce(requires_gradient_sync)\n",
        "            unit.set_requires_gradient_sync(requires_gradient_sync)\n",
        "interop/test_interop_training.py",
    ),
    _mutant(
        "set synchronisation of inner units too, whatever was asked",
        "_gradient_methods.py",
        "        for unit in units_of(self, recurse):\n            unit.set_requires_gradient_sync",
        "        for unit in units_of(self, True):\n            unit.set_requires_gradient_sync",
        "ranks/test_fully_shard_training_accumulation.py ranks/test_misuse.py",
    ),
]
