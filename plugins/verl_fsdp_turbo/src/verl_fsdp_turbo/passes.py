"""Forward and backward beside other engines of the process: what the library keeps once is put in place for each."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.fully_sharded import FullyShardedPasses
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import TokenOutput
from verl_fsdp.forward.micro_batch import MicroBatchForward


class TurboForward(MicroBatchForward):
    """See the base class."""

    def __init__(self, in_use: Callable[[], AbstractContextManager[None]], *args: Any) -> None:
        """Take what makes a context in which the library's state is this engine's, and the base class's arguments."""
        super().__init__(*args)
        self._in_use = in_use

    def __call__(self, model: Any, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch; see the base class."""
        with self._in_use():
            return super().__call__(model, batch, temperature)


class TurboPasses(FullyShardedPasses):
    """See the base class."""

    def __init__(self, root: FSDPModule, in_use: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(root)
        self._in_use = in_use

    @contextmanager
    def gradient_sync(self, *, reduce: bool, is_last: bool = True) -> Iterator[None]:
        """Reduce gradients, or not; a backward may run a part of the forward again."""
        with self._in_use(), super().gradient_sync(reduce=reduce, is_last=is_last):
            yield
