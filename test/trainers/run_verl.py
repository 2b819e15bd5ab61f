"""verl's helpers for FSDP2, as its FSDP engine calls them."""

import harness
import torch
from harness import Run, init_process_group, main, tokens
from hugging_face import llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils import fsdp_utils

# It takes the first GPU where there is none.
fsdp_utils.get_device_id = lambda: torch.device("cpu")


def train(run: Run, **settings: object) -> None:
    init_process_group()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["fsdp"])
    model = llama()
    whole = model.state_dict()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    given = {
        "mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True,
        "shard_placement_fn": fsdp_utils.get_shard_placement_fn(fsdp_size=2),
    }  # fmt: skip
    fsdp_utils.apply_fsdp2(model, given, settings)
    fsdp_utils.fsdp2_load_full_state_dict(model, whole, mesh)
    harness.train(run, model, lambda batch: model(batch, labels=batch).loss, fsdp_utils.fsdp2_clip_grad_norm_)
    # As before it generates, and after.
    fsdp_utils.set_reshard_after_forward(model, False)
    with torch.no_grad():
        run.step(model(tokens(0, 0)).logits)
    model.reshard()
    fsdp_utils.set_reshard_after_forward(model, True)
    run.take("full state", fsdp_utils.get_fsdp_full_state_dict(model, rank0_only=False))


main({"fsdp2": train, "fsdp2 prefetching": lambda run: train(run, forward_prefetch=True)})
