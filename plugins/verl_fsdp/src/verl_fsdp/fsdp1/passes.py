"""Gradients under FSDP1: when they are reduced, and how they and an unfinished pass are forgotten.

All that is private in FSDP1 and concerns a pass is touched here, and nowhere else; names are those of torch 2.9 to
2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _lazy_init

from verl_engine.engine.device import Device
from verl_engine.engine.offload import GradientSlot


def initialize(root: FullyShardedDataParallel) -> None:
    """Do now what FSDP1 does at the first forward: only then are its records of the weights complete."""
    _lazy_init(cast("Any", root), root)


class FlatPasses:
    """Of a model that FSDP1 wrapped; see `verl_fsdp.engine.Passes`."""

    def __init__(self, root: FullyShardedDataParallel, device: Device) -> None:
        self._root = root
        self._device = device

    @contextmanager
    def gradient_sync(self, *, reduce: bool, is_last: bool = True) -> Iterator[None]:
        """Reduce gradients, or keep each rank's own, whole, in the computation's dtype; then reduction is on again."""
        del is_last  # whether FSDP1 keeps parameters gathered is its strategy's
        with nullcontext() if reduce else self._root.no_sync():
            yield
        for handle in _handles(self._root):
            # Where nothing is sharded and nothing trained, FSDP1 takes a module for done before its backward ended.
            # Its parameters would stay plain tensors, which the next forward would take for new ones in place of ours.
            if not handle.uses_sharded_strategy and not handle.flat_param.requires_grad:
                handle._use_sharded_views()  # noqa: SLF001

    def reshard(self) -> None:
        """Free whatever is gathered.

        FSDP1 keeps the root's weights after a forward, and without ``reshard_after_forward`` all, for a backward;
        where none follows, the next forward would take them for the current weights, whatever became of these.
        """
        for handle in _handles(self._root):
            if handle.uses_sharded_strategy and not handle.needs_unshard():
                _free(handle)
        _forget_order(self._root)

    def forget_gradients(self) -> None:
        """Drop every gradient, also the flat ones that the parameters' are views of, unseen by ``zero_grad``."""
        for handle in _handles(self._root):
            flat = handle.flat_param
            flat.grad = None
            for parameter in (*flat._params, *flat._shared_params):  # noqa: SLF001
                parameter.grad = None
            # Present only between a backward's beginning and its end: what the next one would add to.
            if hasattr(flat, "_saved_grad_shard"):
                del flat._saved_grad_shard  # noqa: SLF001

    def recover(self) -> None:
        """Bring FSDP1's records back to where a forward may begin, after an exception in the middle of a pass.

        It does so itself only at the end of a backward. Without this, the next forward fails an assertion about its
        state, or the next backward reduces at the wrong moment, by a hook that the abandoned pass left.
        """
        self._device.synchronize()  # what is under way on FSDP1's own streams uses what is freed now
        for module in _modules(self._root):
            module.training_state = TrainingState.IDLE
        for handle in _handles(self._root):
            flat = handle.flat_param
            handle._training_state = HandleTrainingState.IDLE  # noqa: SLF001
            handle._ran_pre_backward_hook = False  # noqa: SLF001
            handle._needs_pre_forward_unshard = False  # noqa: SLF001
            handle._needs_pre_backward_unshard = False  # noqa: SLF001
            flat._post_backward_called = False  # noqa: SLF001
            if hasattr(flat, "_post_backward_hook_state"):
                flat._post_backward_hook_state[-1].remove()  # noqa: SLF001
                del flat._post_backward_hook_state  # noqa: SLF001
            _free(handle)
        _forget_order(self._root)
        cast("Any", self._root)._post_backward_callback_queued = False  # noqa: SLF001

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the flat ones, which the parameters' are views of."""
        return (FlatGradientSlot(handle) for handle in _handles(self._root))


def _free(handle: Any) -> None:
    """Let a module's parameters be pieces of the shard again, and free the gathered ones."""
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()
    handle._prefetched = False  # noqa: SLF001


def _forget_order(root: FullyShardedDataParallel) -> None:
    """Forget in which order modules ran, to prefetch by: without a backward the list would grow forever."""
    for handle in _handles(root):
        handle._post_forward_index = None  # noqa: SLF001
    cast("Any", root)._exec_order_data.handles_post_forward_order.clear()  # noqa: SLF001


def _modules(root: FullyShardedDataParallel) -> list[Any]:
    return list(FullyShardedDataParallel.fsdp_modules(root))


def _handles(root: FullyShardedDataParallel) -> Iterator[Any]:
    """Yield FSDP1's private record of each module's weights."""
    return (module._handle for module in _modules(root) if module._handle is not None)  # noqa: SLF001


class FlatGradientSlot(GradientSlot):
    """A unit's gradient: reduced, or unreduced and whole. The parameters' own are views of it."""

    @property
    def _flat(self) -> Any:
        return self.holder.flat_param

    def get(self) -> torch.Tensor | None:
        """Look."""
        gradient: torch.Tensor | None = self._flat.grad
        return gradient

    def set(self, gradient: torch.Tensor | None) -> None:
        """Put one in, or None, and let the parameters' own follow."""
        flat = self._flat
        flat.grad = None
        if gradient is not None:
            flat.grad = torch.empty_like(flat)
            flat.grad.data = gradient  # an unreduced one is larger than the shard, which an assignment refuses
        is_whole = gradient is not None and gradient.shape == flat._unpadded_unsharded_size  # noqa: SLF001
        if is_whole or not self.holder.uses_sharded_strategy:
            self.holder._use_unsharded_grad_views()  # noqa: SLF001
        else:
            self.holder._use_sharded_grad_views()  # noqa: SLF001

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether its device is that of the weights."""
        return bool(self._flat.device == gradient.device)
