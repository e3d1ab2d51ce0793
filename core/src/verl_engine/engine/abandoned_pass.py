"""After an exception in the middle of a forward or backward, fully_shard's bookkeeping is brought back to its start."""

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

# All of this reads fully_shard's private state: before torch 2.13 there was no public way.
# ruff: noqa: SLF001


def reset_pass(model: FSDPModule) -> None:
    """Forget the pass that a root was in; parameters may stay gathered."""
    root: Any = model._get_fsdp_state()
    if root._is_root is None:  # no forward was made yet: there is nothing to forget, and the call would fail
        return
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        _reset(root)


def groups_of(state: Any) -> list[Any]:
    """Return fully_shard's private records of the parameters that one module gathers together."""
    # torch 2.13 keeps a list of groups, earlier releases one.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _reset(root: Any) -> None:
    """Do what ``reset_iter_state`` does, which older releases of torch lack; goes when 2.13 is the oldest."""
    root._device_handle.synchronize()  # nothing still reads or writes what is dropped here
    communication, shared = root._comm_ctx, root._state_ctx
    communication.all_gather_state = communication.reduce_scatter_state = None
    getattr(communication, "reduce_scatter_states", []).clear()  # in 2.13
    communication.post_forward_order.clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    for state in shared.all_states:
        state._training_state = TrainingState.IDLE  # in PRE_BACKWARD, the next forward would gather nothing
        state._modules_to_run_forward.clear()
        for group in groups_of(state):
            _reset_group(group)


def _reset_group(group: Any) -> None:
    work = None if group._all_gather_result is None else group._all_gather_result.all_gather_work
    if isinstance(work, dist.Work):
        work.wait()
    group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
    group._post_reduce_event = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
