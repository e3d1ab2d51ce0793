"""What the loops ask of the trainer and of a rollout worker, wherever those run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.rollout.interface import (
        Acknowledgement,
        Completion,
        GenerationRequest,
        PauseMode,
        WeightTransport,
    )
    from verl_engine.batch import sequence
    from verl_engine.engine.base import LossFn
    from verl_engine.engine.train_step import Normalizer, StepReport
    from verl_engine.engine.weights.bucket import WeightBucket

RankBatches = list[list[list["sequence.Sequence"]]]
"""``batches[rank][micro_batch]``: the sequences of one micro-batch of one data-parallel rank."""


@dataclass(frozen=True, slots=True)
class BucketDelivery:
    """A weight bucket on its way."""

    handle: Any
    """Where its bytes are; only the transport looks inside."""
    checksum: int


class Trainer(Protocol):
    """All trainer ranks as one."""

    data_parallel_size: int
    """Over how many a global batch is divided: the trainer ranks, or fewer where several compute the same data."""

    async def train_batch(
        self, batches: RankBatches, loss_fn: LossFn, temperature: float, normalizer: Normalizer = "tokens"
    ) -> StepReport:
        """Make one optimizer step over a global batch; the sums of the loss are divided by the normaliser."""

    async def infer_batch(
        self, batches: RankBatches, temperature: float, tag: str | None = None
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs in the shape of `batches`, with the current weights, or those kept under a tag."""

    async def infer_reference(
        self, batches: RankBatches, temperature: float
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
    """One rollout worker, wherever it runs; see `RolloutEngine` for what its calls mean."""

    name: str
    """``rollouter-0``, …"""

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        """Send requests; while the engine is paused they wait there.

        Args:
            requests: each with a `request_id` that no other in flight here has.
            on_completion: called in the event loop for each sample, while `serve` runs.
            sealed: see `RolloutEngine.submit`.
        """

    async def serve(self) -> None:
        """Hand completions to those who want them, until cancelled.

        Raises:
            EngineError: a submission was refused, or the worker failed or is gone.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, and return when nothing moves any more."""

    async def resume(self) -> None:
        """Go on."""

    async def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Expect the buckets of a plan; while paused."""

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        """Check the next bucket and copy it into the model."""

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use, and return what each receiver then has."""

    async def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder, and return what they are: version and dtype."""
