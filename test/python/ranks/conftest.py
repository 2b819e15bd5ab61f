"""Ranks are forked from a server: what it has imported, no rank needs to."""

from shardwise import testing

testing.PRELOAD += [
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]
