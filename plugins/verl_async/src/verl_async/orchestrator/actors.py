"""What the loops ask of the trainer and of a rollout worker, wherever those run."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.rollout.interface import Acknowledgement, Generation, GenerationRequest, WeightTransport
    from verl_engine.batch import sequence
    from verl_engine.engine.base import LossFn
    from verl_engine.engine.train_step import Normalizer, StepReport
    from verl_engine.engine.weights.bucket import WeightBucket

ShareBatches = list[list[list["sequence.Sequence"]]]
"""``batches[share][micro_batch]``: the sequences of one micro-batch of one share of the data."""


@dataclass(frozen=True, slots=True)
class BucketDelivery:
    """A weight bucket on its way."""

    handle: Any
    """Where its bytes are; only the transport looks inside."""
    checksum: int


class Trainer(Protocol):
    """All trainer ranks as one."""

    num_shares: int
    """Into how many a global batch is divided: the trainer ranks, or fewer where several compute one share together."""

    async def train_batch(
        self, batches: ShareBatches, loss_fn: LossFn, temperature: float, normalizer: Normalizer = "tokens"
    ) -> StepReport:
        """Make one optimizer step over a global batch; the sums of the loss are divided by the normaliser."""

    async def infer_batch(
        self, batches: ShareBatches, temperature: float, tag: str | None = None
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs in the shape of `batches`, with the current weights, or those kept under a tag."""

    async def infer_reference(
        self, batches: ShareBatches, temperature: float
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs of the reference policy, in the shape of `batches`."""

    async def keep_weights(self, tag: str) -> None:
        """Keep the current weights aside, over what the tag held before."""

    async def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """Divide the weights into buckets."""

    async def open_transport(self) -> WeightTransport:
        """Return how the buckets of the plan travel; readers that open it do so before `release_transport`."""

    async def release_transport(self) -> None:
        """Remove what `open_transport` left for others to find; whoever has opened it keeps it."""

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        """Gather a bucket of the last plan into one of two slots; what the slot held before is gone."""

    async def save_pretrained(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""


class RolloutClient(Protocol):
    """One rollout worker."""

    name: str
    """``rollouter-0``, …"""

    async def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate a batch to its end, or to an `interrupt`; return its samples in order."""

    async def interrupt(self) -> None:
        """Make a running `generate` return after its current token."""

    async def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Expect the buckets of a plan."""

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        """Check the next bucket and copy it into the model."""

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use, and return what each receiver then has."""

    async def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder, and return what they are: version and dtype."""


@dataclass(slots=True)
class RolloutWorker:
    """A rollout worker, and who may use it: one `generate` at a time, and none during a weight sync."""

    client: RolloutClient
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.client.name

    @asynccontextmanager
    async def using(self) -> AsyncIterator[RolloutClient]:
        """Use the worker alone, after those who asked earlier."""
        async with self._lock:
            yield self.client

    @asynccontextmanager
    async def paused(self, *, interrupt: bool) -> AsyncIterator[RolloutClient]:
        """Use the worker alone while generation rests.

        Args:
            interrupt: stop a running `generate` between two tokens; else wait for its end.
        """
        entering = asyncio.ensure_future(self._lock.acquire())
        try:
            while not entering.done():
                if interrupt:
                    # Again and again: a generate that was just being sent off would not have heard the first call.
                    await self.client.interrupt()
                await asyncio.wait({entering}, timeout=0.05)
        except BaseException:
            if not entering.cancel() and not entering.cancelled():
                self._lock.release()
            raise
        try:
            yield self.client
        finally:
            self._lock.release()
