"""Passes under fully_shard: when gradients are reduced, and how they and what was gathered are forgotten."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from verl_engine.engine.abandoned_pass import groups_of, reset_pass
from verl_engine.engine.offload import GradientSlot


class FullyShardedPasses:
    """What a model holds between a forward and a step whose root and blocks were given to ``fully_shard``.

    An engine calls `gradient_sync` and `gradient_slots` in its own methods of these names, `forget_gradients` in
    ``drop_gradients``, `recover` in ``zero_grad`` and after a failed forward, `reshard` after one without gradient.
    """

    def __init__(self, root: FSDPModule, *, keep_unsharded: bool = False) -> None:
        """Look at a sharded model.

        Args:
            root: the model.
            keep_unsharded: leave parameters gathered between forward and backward, and after the backward of any but
                the last micro-batch, so that each is gathered once an accumulation.
        """
        self._root = root
        self._own = [GradientSlot(parameter) for parameter in cast("torch.nn.Module", root).parameters()]
        self._keep_unsharded = keep_unsharded

    @contextmanager
    def gradient_sync(self, *, reduce: bool, is_last: bool = True) -> Iterator[None]:
        """Reduce gradients in the backward inside, or keep each rank's own unreduced in float32.

        Afterwards all switches are as they were, also after an exception.

        Args:
            reduce: whether to.
            is_last: whether this is the last micro-batch.
        """
        with self._parameters_kept(is_last=is_last) if self._keep_unsharded else nullcontext():
            self._root.set_requires_gradient_sync(reduce)
            try:
                yield
            finally:
                self._root.set_requires_gradient_sync(True)

    @contextmanager
    def _parameters_kept(self, *, is_last: bool) -> Iterator[None]:
        """Gather what is not gathered yet, and free it after the last micro-batch's backward only."""
        root = self._root
        # The first forward of a root decides whether that reshards: let it do so before the setting is looked at.
        root._get_fsdp_state()._lazy_init()  # noqa: SLF001 - there is no public way to ask for it
        groups = list(_param_groups(root))
        # set_reshard_after_forward would do, but the number of ranks that was there before could not be put back.
        before = [group.post_forward_mesh_info for group in groups]
        for group in groups:
            group.post_forward_mesh_info = None
        root.set_reshard_after_backward(is_last)
        root.set_is_last_backward(is_last)
        try:
            yield
        finally:
            for group, mesh_info in zip(groups, before, strict=True):
                group.post_forward_mesh_info = mesh_info
            root.set_reshard_after_backward(True)
            root.set_is_last_backward(True)

    def reshard(self) -> None:
        """Free what fully_shard keeps: the root's parameters, and with ``reshard_after_forward: false`` the blocks'.

        Kept beyond a forward without backward, they would go on being used when others were restored or loaded.
        """
        for module in fsdp_modules(self._root):
            module.reshard()

    def recover(self) -> None:
        """Bring fully_shard's bookkeeping back to where a forward may begin."""
        reset_pass(self._root)
        self.reshard()

    def forget_gradients(self) -> None:
        """Drop every gradient, those of an unfinished accumulation too.

        ``zero_grad`` sees sharded gradients only. What a backward without reduction kept lies in the unsharded
        parameters, and would be added to the next accumulation when this one was abandoned: it would count twice.
        """
        for slot in self.gradient_slots():
            slot.set(None)

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the shards' own, and where unreduced ones are: as they came, or in float32 if gathered otherwise."""
        yield from self._own
        for group in _param_groups(self._root):
            for fsdp_param in group.fsdp_params:
                yield GradientSlot(fsdp_param, "unsharded_accumulated_grad")
                unsharded = getattr(fsdp_param, "_unsharded_param", None)
                if unsharded is not None:
                    yield GradientSlot(unsharded)


def fsdp_modules(model: FSDPModule) -> Iterator[FSDPModule]:
    """Yield every module that fully_shard was applied to."""
    assert isinstance(model, torch.nn.Module)
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _param_groups(model: FSDPModule) -> Iterator[Any]:
    """Yield fully_shard's private record of each set of parameters that is gathered together."""
    for module in fsdp_modules(model):
        yield from groups_of(module._get_fsdp_state())  # noqa: SLF001 - what keeps unreduced gradients has no public access
