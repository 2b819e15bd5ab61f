"""What torchtitan needs to run on CPUs. Import it before torchtitan."""

import importlib

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # its meshes of one rank name this backend

# It takes CUDA for the device where torch finds no accelerator.
torch._utils._get_available_device_type = lambda: "cpu"

# Its own choices of attention need a GPU.
attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
choices = importlib.import_module("torchtitan.models.common.config_utils")
choices.get_attention_config = lambda backend: attention.Config()


def exchange(outputs, inputs, group=None, async_op=False):
    """all_to_all() for Gloo, which takes no lists of tensors of several sizes."""
    out = torch.empty(sum(each.numel() for each in outputs), dtype=inputs[0].dtype)
    sizes = [[each.numel() for each in side] for side in (outputs, inputs)]
    dist.all_to_all_single(out, torch.cat([each.flatten() for each in inputs]), *sizes, group=group)
    for output, part in zip(outputs, out.split(sizes[0]), strict=True):
        output.copy_(part.view(output.shape))


dist.all_to_all = dist.distributed_c10d.all_to_all = exchange
