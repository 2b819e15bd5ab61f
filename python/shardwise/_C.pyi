# Made by scripts/make_stubs.py from csrc/bindings.
"""
The shardwise engine. Use the package shardwise, not this module.
"""
from __future__ import annotations
import builtins
import collections.abc
import datetime
import torch
import torch._C._distributed_c10d
import torch.distributed
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['BackgroundSave', 'Call', 'Error', 'GivenParameter', 'GradientReductionHandle', 'Link', 'MemoryEstimate', 'Mesh', 'ModuleUnit', 'Options', 'Outline', 'PeerError', 'Piece', 'Pipeline', 'PipelineOptions', 'Policy', 'Ranks', 'SavedFolder', 'Split', 'TensorParallel', 'TimeEstimate', 'Unit', 'UnshardHandle', 'ValueError', 'check_export', 'check_pieces', 'clip_grad_norm_', 'cpp_unit', 'estimate_memory', 'estimate_time', 'export_tensors', 'full_state_dict', 'fully_shard', 'has_unit', 'hollow', 'keep_newest_steps', 'leftovers', 'load_full_state_dict', 'make_record_file', 'make_transport', 'merge_checkpoint', 'newest_step', 'parallelize', 'remove_dead_leftovers', 'replicate', 'save_pieces', 'set_shared_memory_listener', 'share_comm_context', 'start_record', 'step_folder', 'stop_record', 'verify_checkpoint']
class Error(RuntimeError):
    """
    An error of shardwise. The message says what happened, where, and what to do.
    
    >>> try:
    ...     loss.backward()
    ... except shardwise.Error as error:
    ...     print(error)
    """
class PeerError(Error, torch.distributed.DistError):
    """
    Another rank, the store or a process group failed or did not answer.
    
    It is a torch.distributed.DistError, so programs that catch torch's errors of other ranks catch it too.
    
    >>> try:
    ...     loss.backward()
    ... except shardwise.PeerError:
    ...     save_and_leave()
    """
class Mesh:
    """
    Named axes, with a process group for each.
    """
    @staticmethod
    def from_process_groups(names: collections.abc.Sequence[str], groups: collections.abc.Sequence[torch.distributed.distributed_c10d.ProcessGroup], device: torch.device) -> Mesh:
        """
        A mesh over process groups that exist, one for each axis, the slowest axis first.
        """
    def __repr__(self) -> str:
        ...
    def coordinate(self, axis: str) -> int:
        ...
    def group(self, axis: str) -> torch.distributed.distributed_c10d.ProcessGroup:
        ...
    @typing.overload
    def size(self) -> int:
        ...
    @typing.overload
    def size(self, axis: str) -> int:
        ...
    @property
    def axes(self) -> list[tuple[str, int]]:
        ...
    @property
    def device(self) -> torch.device:
        ...
    @property
    def rank(self) -> int:
        ...
class Options:
    """
    The user's options; `pin_memory` is for shards on the host, None if they are not there.
    """
    def __init__(self, *, param_dtype: torch.dtype | None, param_dtype_override: typing.Any, reduce_dtype: torch.dtype | None, output_dtype: torch.dtype | None, cast_forward_inputs: bool, pin_memory: bool | None, reshard_after_forward: bool | typing.SupportsInt | None) -> None:
        ...
class UnshardHandle:
    """
    An unshard() under way.
    """
    def wait(self) -> None:
        ...
class GradientReductionHandle:
    """
    The sums that finalize_backward() started.
    """
    def wait(self) -> None:
        ...
class Unit:
    """
    The handle on one call.
    """
    def counters(self) -> dict[str, int]:
        ...
    def finalize_backward(self) -> GradientReductionHandle:
        ...
    def free_idle_memory(self) -> None:
        ...
    def plan_json(self) -> str:
        ...
    def plan_table(self) -> str:
        ...
    def requires_gradient_sync(self) -> bool:
        ...
    def reset_iter_state(self) -> None:
        ...
    def reshard(self) -> None:
        ...
    def set_all_reduce_hook(self, hook: typing.Any) -> None:
        ...
    def set_backward_prefetch(self, units: collections.abc.Sequence[Unit]) -> None:
        ...
    def set_custom_all_gather(self, comm: typing.Any) -> None:
        ...
    def set_custom_reduce_scatter(self, comm: typing.Any) -> None:
        ...
    def set_force_sum_reduction(self, value: bool) -> None:
        ...
    def set_forward_prefetch(self, units: collections.abc.Sequence[Unit]) -> None:
        ...
    def set_gradient_divide_factor(self, factor: typing.SupportsFloat) -> None:
        ...
    def set_keep_unsharded_storage(self, value: bool) -> None:
        ...
    def set_manual_backward_finalization(self, value: bool) -> None:
        ...
    def set_memory_from_process_group(self, value: bool) -> None:
        ...
    def set_post_optim_event(self, event: typing.Any) -> None:
        """
        This call waits for the event.
        """
    def set_reduce_scatter_max_input_buffers(self, count: typing.SupportsInt) -> None:
        ...
    def set_reduce_scatter_unused_params(self, value: bool) -> None:
        ...
    def set_requires_all_reduce(self, value: bool) -> None:
        ...
    def set_requires_gradient_sync(self, value: bool) -> None:
        ...
    def set_reshard_after_backward(self, value: bool) -> None:
        ...
    def set_reshard_after_forward(self, value: bool) -> None:
        ...
    def set_unshard_in_backward(self, value: bool) -> None:
        ...
    def unshard(self) -> UnshardHandle:
        ...
    @property
    def kind(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
class GivenParameter:
    """
    A parameter as a unit takes it over.
    """
    def __init__(self, *, names: collections.abc.Sequence[str], owners: collections.abc.Sequence[tuple[typing.Any, str]], full: typing.Any, memory: typing.Any, values: typing.Any, shard_dim: typing.SupportsInt, full_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, extension: typing.Any) -> None:
        ...
class ModuleUnit(Unit):
    """
    The engine's side of one call for nn.Modules.
    """
    def __init__(self, mesh: Mesh, parameters: collections.abc.Sequence[GivenParameter], adopted: collections.abc.Sequence[tuple[collections.abc.Sequence[str], torch.Tensor]], options: Options, *, replicates: bool, neighbours: torch.distributed.distributed_c10d.ProcessGroup | None, is_companion: bool, companions: collections.abc.Sequence[ModuleUnit]) -> None:
        ...
    def fail_forward(self) -> None:
        ...
    def look_again(self) -> None:
        ...
    def post_forward(self, module: typing.Any, args: typing.Any, output: typing.Any) -> typing.Any:
        ...
    def pre_forward(self, module: typing.Any, args: typing.Any, kwargs: typing.Any) -> typing.Any:
        ...
    def reduce_pending(self) -> None:
        ...
    def set_conversions(self, inputs: typing.Any, outputs: typing.Any) -> None:
        ...
    def set_extend(self, extend: typing.Any) -> None:
        ...
    def set_modules(self, modules: collections.abc.Sequence[typing.Any]) -> None:
        ...
    def set_post_optim_event(self, event: typing.Any) -> None:
        """
        The next forward waits for the event.
        """
    def shards(self) -> list[torch.Tensor]:
        ...
    def show_as(self, index: typing.SupportsInt, parameter: typing.Any, to_memory: typing.Any) -> None:
        ...
    def take_memory(self) -> None:
        ...
    @property
    def shows_full(self) -> bool:
        ...
class Call:
    """
    A call of a C++ module that fires its hooks.
    """
    def __init__(self, module: typing.Any) -> None:
        ...
    def begin(self, inputs: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ...
    def end(self, outputs: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ...
    def fail(self) -> None:
        ...
class MemoryEstimate:
    """
    Bytes of one rank's tensors; str() is a table with bars.
    
    >>> shardwise.estimate_memory(model, 8).backward_peak
    """
    def __repr__(self) -> str:
        ...
    def json(self) -> str:
        ...
    @property
    def after_step(self) -> int:
        ...
    @property
    def backward_peak(self) -> int:
        ...
    @property
    def buffers(self) -> int:
        ...
    @property
    def forward_peak(self) -> int:
        ...
    @property
    def gradients(self) -> int:
        ...
    @property
    def optimizer(self) -> int:
        ...
    @property
    def parameters(self) -> int:
        ...
    @property
    def pool(self) -> int:
        ...
    @property
    def unsummed_gradients(self) -> int:
        ...
class Link:
    """
    What data travels over: how many bytes a second, and the seconds that each collective takes besides.
    
    >>> shardwise.Link(450e9, latency=10e-6)
    """
    def __init__(self, bytes_per_second: typing.SupportsFloat, latency: typing.SupportsFloat = 0.0) -> None:
        ...
    @property
    def bytes_per_second(self) -> float:
        ...
    @property
    def latency(self) -> float:
        ...
class TimeEstimate:
    """
    Seconds of one step of a rank; str() is a table with bars.
    
    >>> shardwise.estimate_time(model, 8, link=shardwise.Link(25e9), compute=0.12).step
    """
    def __repr__(self) -> str:
        ...
    def json(self) -> str:
        ...
    @property
    def compute(self) -> float:
        ...
    @property
    def step(self) -> float:
        ...
    @property
    def wire(self) -> float:
        ...
class Policy:
    """
    How a module will be wrapped, and on how many ranks, for an estimate.
    """
    def __init__(self, options: Options, world: typing.SupportsInt, *, replicates: bool, copies: typing.SupportsInt, rank: typing.SupportsInt, optimizer_factor: typing.SupportsFloat, reduce_scatter_max_input_buffers: typing.SupportsInt, keep_unsharded_storage: bool, device: torch.device | None) -> None:
        ...
class Outline:
    """
    A module, as an estimate of memory needs it.
    """
    def __init__(self, buffer_bytes: typing.SupportsInt) -> None:
        ...
    def add_parameter(self, *, sizes: collections.abc.Sequence[typing.SupportsInt], dtype: torch.dtype, dim: typing.SupportsInt, whole: bool, full_dtype: torch.dtype | None, trained: bool, looked_up: bool) -> None:
        ...
    def add_unit(self, *, parameters: collections.abc.Sequence[typing.SupportsInt], outer: typing.SupportsInt | None, has_full_copies: bool) -> None:
        ...
    def begin(self, unit: typing.SupportsInt) -> None:
        """
        What comes next in a forward.
        """
    def end(self, unit: typing.SupportsInt) -> None:
        ...
    def use(self, parameter: typing.SupportsInt) -> None:
        ...
class Piece:
    """
    What a rank has of a tensor of a checkpoint.
    """
    def __init__(self, name: str, sizes: collections.abc.Sequence[typing.SupportsInt], boxes: collections.abc.Sequence[tuple[collections.abc.Sequence[typing.SupportsInt], collections.abc.Sequence[typing.SupportsInt]]], values: torch.Tensor, must_agree: bool = False) -> None:
        """
        `boxes`: offsets and sizes of each; their elements, one box after the other, are those of `values`.
        """
    @property
    def name(self) -> str:
        ...
    @property
    def sizes(self) -> list[int]:
        ...
    @property
    def values(self) -> torch.Tensor:
        ...
class Ranks:
    """
    The ranks that save or load a checkpoint together.
    """
    @staticmethod
    def beside(mesh: Mesh) -> Ranks:
        """
        Over process groups that nothing else uses, for saves in the background.
        """
    @typing.overload
    def __init__(self) -> None:
        """
        A rank that is alone.
        """
    @typing.overload
    def __init__(self, mesh: Mesh, function: str) -> None:
        ...
    def together(self, act: collections.abc.Callable[..., typing.Any]) -> list[str]:
        """
        What raises on one rank raises on all. Returns what each rank's call returned, a text or None for an empty one.
        """
    @property
    def rank(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
class SavedFolder:
    """
    The tensors and values of a checkpoint.
    """
    @staticmethod
    def on_all_ranks(ranks: Ranks, folder: str, entry: str = '') -> SavedFolder:
        """
        Raises Error unless all ranks name one folder and find the same checkpoint.
        """
    def __init__(self, folder: str) -> None:
        ...
    def read_piece(self, piece: Piece) -> torch.Tensor:
        """
        New values like those of the piece.
        """
    def read_whole(self, name: str) -> torch.Tensor:
        ...
    @property
    def files(self) -> list[str]:
        ...
    @property
    def path(self) -> str:
        ...
    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """
        The dtype and the sizes of each.
        """
    @property
    def unknown(self) -> dict[str, str]:
        """
        Tensors that cannot be read, with their dtypes, which torch does not have.
        """
    @property
    def values(self) -> dict[str, typing.Any]:
        ...
    @property
    def world(self) -> int | None:
        """
        How many ranks wrote it; None if another program did.
        """
class BackgroundSave:
    """
    Saves that are written while the program goes on.
    """
    def __init__(self) -> None:
        ...
    def begin(self, ranks: Ranks, beside: Ranks, folder: str, pieces: collections.abc.Sequence[Piece], values: dict[str, typing.Any]) -> None:
        ...
    def finish(self) -> None:
        """
        Waits. An error goes to stderr, and the process does not exit with 0.
        """
    def wait(self) -> None:
        ...
    @property
    def is_under_way(self) -> bool:
        ...
class Split:
    """
    How the ranks along an axis divide a layer of a C++ module.
    """
    def __init__(self, *, kind: str, gather_output: bool = False, split_input: bool = False, segments: typing.SupportsInt = 1, heads: typing.SupportsInt | None = None, sequence_dim: typing.SupportsInt | None = None, transposed: bool = False) -> None:
        ...
class TensorParallel:
    """
    What parallelize() did.
    """
    def counters(self) -> dict[str, int]:
        """
        The collectives along the axis so far, by name.
        """
    def table(self) -> str:
        """
        A line for each parameter: its name, its sizes, this rank's piece.
        """
class PipelineOptions:
    """
    How a pipeline works.
    """
    def __init__(self, *, schedule: str, microbatches: typing.SupportsInt, stages_per_rank: typing.SupportsInt, loss: typing.Any, mean: bool, gather_once: bool) -> None:
        ...
class Pipeline:
    """
    Stages of C++ modules on the ranks along an axis.
    """
    @staticmethod
    def stages_of(mesh: Mesh, axis: str, options: PipelineOptions) -> list[int]:
        ...
    def __init__(self, mesh: Mesh, axis: str, make: collections.abc.Callable[..., typing.Any], options: PipelineOptions) -> None:
        ...
    def bubble(self) -> list[float]:
        ...
    def evaluate(self, inputs: collections.abc.Sequence[torch.Tensor], targets: collections.abc.Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ...
    def step(self, inputs: collections.abc.Sequence[torch.Tensor], targets: collections.abc.Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ...
    def table(self) -> str:
        ...
    @property
    def stages(self) -> int:
        ...
class ValueError(Error, builtins.ValueError):
    pass
def check_export(ranks: Ranks, file: str) -> None:
    ...
def check_pieces(ranks: Ranks, pieces: collections.abc.Sequence[Piece]) -> None:
    """
    Raises Error unless all ranks together have each element.
    """
def clip_grad_norm_(parameters: collections.abc.Sequence[torch.Tensor], max_norm: typing.SupportsFloat, *, norm_type: typing.SupportsFloat, error_if_nonfinite: bool) -> torch.Tensor:
    ...
def cpp_unit(module: typing.Any) -> Unit | None:
    """
    The handle of the call that wrapped this C++ module.
    """
def estimate_memory(outline: Outline, policy: Policy) -> MemoryEstimate:
    ...
def estimate_time(outline: Outline, policy: Policy, *, inside: Link, between: Link | None, ranks_per_host: typing.SupportsInt, compute: typing.SupportsFloat) -> TimeEstimate:
    ...
def export_tensors(ranks: Ranks, file: str, tensors: collections.abc.Mapping[str, torch.Tensor]) -> None:
    """
    The first rank writes one safetensors file.
    """
def full_state_dict(module: typing.Any, *, rank0_only: bool, cpu_offload: bool) -> dict[str, typing.Any]:
    ...
def fully_shard(modules: collections.abc.Sequence[typing.Any], mesh: Mesh, options: Options, *, placement: typing.Any, ignored: collections.abc.Sequence[torch.Tensor]) -> Unit:
    ...
def has_unit(tensor: torch.Tensor) -> bool:
    """
    Whether a unit has this parameter.
    """
def hollow(sizes: collections.abc.Sequence[typing.SupportsInt], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """
    A tensor of these sizes, to which a unit will give memory.
    """
def keep_newest_steps(root: str, count: typing.SupportsInt) -> list[str]:
    ...
def leftovers(root: str) -> list[tuple[str, bool]]:
    """
    Folders that saves left, or are at work on, and whether their process has ended.
    """
def load_full_state_dict(module: typing.Any, values: dict[str, typing.Any], *, strict: bool, broadcast_from_rank0: bool) -> tuple[list[str], list[str], int]:
    ...
def make_record_file(folder: str, rank: typing.SupportsInt) -> str:
    """
    Makes a new file for the record of a rank, and returns its path.
    """
def make_transport(store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt, size: typing.SupportsInt, timeout: datetime.timedelta, names: collections.abc.Sequence[typing.SupportsInt]) -> torch._C._distributed_c10d.Backend:
    """
    The back end of the direct transport; `names` are the numbers of its ranks in the default process group, or none for that group itself.
    """
def merge_checkpoint(folder: str, to: str, most_bytes: typing.SupportsInt) -> list[str]:
    """
    Writes the model's tensors whole, as Hugging Face's libraries read them; returns the names of the files.
    """
def newest_step(root: str) -> tuple[int, str] | None:
    ...
def parallelize(module: typing.Any, mesh: Mesh, axis: str, plan: collections.abc.Sequence[tuple[str, Split]], *, broadcast: bool, allow_aliases: bool) -> TensorParallel:
    ...
def remove_dead_leftovers(root: str) -> list[str]:
    """
    Returns those that it removed.
    """
def replicate(modules: collections.abc.Sequence[typing.Any], mesh: Mesh, options: Options, *, ignored: collections.abc.Sequence[torch.Tensor]) -> Unit:
    ...
def save_pieces(ranks: Ranks, folder: str, pieces: collections.abc.Sequence[Piece], values: dict[str, typing.Any]) -> None:
    ...
def set_shared_memory_listener(listener: typing.SupportsInt) -> None:
    """
    The address of a C function that gets each change in bytes, for measurements.
    """
def share_comm_context(units: collections.abc.Sequence[Unit]) -> None:
    ...
def start_record() -> None:
    ...
def step_folder(root: str, step: typing.SupportsInt) -> str:
    ...
def stop_record() -> str:
    ...
def verify_checkpoint(folder: str) -> list[str]:
    """
    What is wrong with each file that is not what was saved.
    """
__version__: str
