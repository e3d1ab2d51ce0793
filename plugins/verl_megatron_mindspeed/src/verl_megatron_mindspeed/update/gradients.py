"""The buffers that gradients are accumulated and reduced in: Megatron's, kept right after a failed pass."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.distributed import finalize_model_grads

from verl_engine.engine.device import Device
from verl_megatron_mindspeed.update.memory import FlatMemory


class Gradients:
    """The gradients of all chunks of the model on this rank: float32, flat, whole also where the optimizer is not."""

    def __init__(self, chunks: Sequence[Any], device: Device) -> None:
        """Begin with zeros; the chunks are wrapped in Megatron's DistributedDataParallel."""
        self._chunks = chunks
        self._memories = [
            FlatMemory(buffer.grad_data, device)
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._depth = 0
        self._is_used = False
        self._is_complete = False

    @property
    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)

    @contextmanager
    def sync(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """Hold gradients back inside; for the last micro-batch hold nothing back.

        Contexts may be nested. Megatron's own end with the innermost.
        """
        self._is_used = True
        with ExitStack() as stack:
            if not is_last_micro_batch:
                self._depth += 1
                stack.callback(self._leave)
                if self._depth == 1:
                    for chunk in self._chunks:
                        stack.enter_context(chunk.no_sync())
            yield

    def _leave(self) -> None:
        self._depth -= 1

    def finalize(self, chunks: list[Any], num_tokens: Any = None, **options: Any) -> None:
        """Reduce over all ranks; what Megatron's schedules call after the last backward.

        Sums, divided by nothing: the loss has been divided by the number of tokens of the global batch already.
        """
        del num_tokens
        self._is_used = True
        finalize_model_grads(chunks, None, **options)
        self._is_complete = True

    def clear(self) -> None:
        """Set all to zero, after a pass that did not end too: nothing of it is left. No collectives of its own."""
        for group in self._bucket_groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            if not self._is_complete:
                # Megatron would take what it saw of the backward for all that there is to see.
                group.per_param_grad_ready_counts = {}
        for chunk in self._chunks:
            for parameter in chunk.params_with_grad:
                parameter.grad = None
        self._is_used = self._is_complete = False
        if any(memory.is_away for memory in self._memories):
            for memory in self._memories:
                memory.forget()
        else:
            self._zero()

    def _zero(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def move(self, *, to_cpu: bool) -> None:
        """Free the buffers, or take memory for them again; what an accumulation under way has in them is kept."""
        if to_cpu:
            for memory in self._memories:
                memory.release(keep=self._is_used)
        else:
            for memory in self._memories:
                memory.take_back()
            if not self._is_used:
                self._zero()
