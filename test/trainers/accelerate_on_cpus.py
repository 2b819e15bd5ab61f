"""Accelerate on CPUs. There it takes DDP, and leaves FSDP2 and other meshes aside, unless it is told of GPUs."""

from accelerate import PartialState
from accelerate.utils import DistributedType


def take_cpus_for_gpus() -> None:
    """For every Accelerator that this process makes from now on. Tensors stay on the CPU."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
