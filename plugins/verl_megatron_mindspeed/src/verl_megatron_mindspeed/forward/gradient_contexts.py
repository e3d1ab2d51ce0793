"""The contexts of ``engine_gradient_sync`` around the micro-batches of a pipeline, which run through each other.

Megatron's schedule holds gradients back until the backward of the last micro-batch, stage by stage. So the contexts of
all micro-batches but the last are entered together before the first forward, and left, for that of the last, where the
schedule lets gradients go.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from verl_engine.engine.base import MicroBatchPass


class PipelineContexts(AbstractContextManager["PipelineContexts"]):
    """Enters one context for each micro-batch; all are left at the end, after an exception too."""

    def __init__(self, given: MicroBatchPass, chunks: Sequence[torch.nn.Module]) -> None:
        self._gradient_sync = given.gradient_sync
        self._num_micro_batches = len(given.micro_batches)
        self._chunks: Sequence[Any] = chunks
        self._entered = ExitStack()
        self._is_last = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave what is entered."""
        self._entered.__exit__(kind, error, traceback)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold gradients back inside: Megatron's ``no_sync_func``.

        The interleaved schedule enters it again for parts of the model whose last backward is yet to come.
        """
        held = self._entered.enter_context(ExitStack())
        if not self._is_last:
            for _ in range(self._num_micro_batches - 1):
                held.enter_context(self._gradient_sync(False))
        for chunk in self._chunks:
            held.enter_context(chunk.no_sync())  # a single micro-batch may have been filled up
        yield
        held.close()
        if not self._is_last:
            self._is_last = True
            self._entered.enter_context(self._gradient_sync(True))
