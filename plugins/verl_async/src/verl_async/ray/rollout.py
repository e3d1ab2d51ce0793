"""Rollout engines as Ray actors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray

from verl_async.asynchrony.rollout_host import RolloutHost
from verl_async.ray.answers import answer
from verl_async.rollout.kind import ROLLOUT
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.asynchrony.actors import Acknowledgement, BucketDelivery
    from verl_async.config import RolloutConfig
    from verl_async.rollout.interface import Generation, GenerationRequest
    from verl_engine.engine.weights.bucket import WeightBucket


class RolloutActor:
    """One rollout process. Asynchronous, so that `interrupt` is heard while `generate` works in its thread."""

    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        """Remember what to load."""
        self._config = config
        self._model_folder = model_folder

    async def start(self) -> str:
        """Load the engine by name and its model; return this node's id."""
        self._host = await asyncio.to_thread(self._load)
        return str(ray.get_runtime_context().get_node_id())

    def _load(self) -> RolloutHost:
        engine: Any = load_plugin(ROLLOUT, self._config.engine, "rollout.engine").plugin
        return RolloutHost(engine(self._config, self._model_folder))

    async def attach_slots(self, paths: list[str]) -> None:
        """See `RolloutHost.attach_slots`."""
        self._host.attach_slots(paths)

    async def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """See `RolloutHost.generate`."""
        return await asyncio.to_thread(self._host.generate, requests)

    async def interrupt(self) -> None:
        """See `RolloutHost.interrupt`."""
        self._host.interrupt()

    async def load_bucket(self, bucket: WeightBucket, payload: int | npt.NDArray[np.uint8], checksum: int) -> None:
        """See `RolloutHost.load_bucket`; Ray hands over the payload itself."""
        await asyncio.to_thread(self._host.load_bucket, bucket, payload, checksum)

    async def commit_weights(self, version: int) -> Acknowledgement:
        """See `RolloutHost.commit_weights`."""
        return await asyncio.to_thread(self._host.commit_weights, version)

    async def save_pretrained(self, folder: Path) -> str:
        """See `RolloutHost.save_pretrained`."""
        return await asyncio.to_thread(self._host.save_pretrained, folder)


class RayRolloutClient:
    """A `RolloutClient` of an actor."""

    def __init__(self, index: int, config: RolloutConfig, model_folder: Path, options: dict[str, Any]) -> None:
        """Start the actor; `start` waits for it."""
        self.name = f"rollouter-{index}"
        self.node_id = ""
        self.actor: Any = ray.remote(RolloutActor).options(**options).remote(config, model_folder)

    async def start(self) -> None:
        """Load the model."""
        self.node_id = await answer(self.actor.start.remote(), self.name)

    async def attach_slots(self, paths: list[str]) -> None:
        """Map the trainer's shared buffers."""
        await answer(self.actor.attach_slots.remote(paths), self.name)

    async def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate; see `RolloutEngine.generate`."""
        generations: list[Generation] = await answer(self.actor.generate.remote(requests), self.name)
        return generations

    async def interrupt(self) -> None:
        """Make a running `generate` return after its current token."""
        await answer(self.actor.interrupt.remote(), self.name)

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        """Check a bucket and copy it into the model."""
        await answer(self.actor.load_bucket.remote(delivery.bucket, delivery.payload, delivery.checksum), self.name)

    async def commit_weights(self, version: int) -> Acknowledgement:
        """Put the loaded weights in use."""
        acknowledgement: Acknowledgement = await answer(self.actor.commit_weights.remote(version), self.name)
        return acknowledgement

    async def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder."""
        about: str = await answer(self.actor.save_pretrained.remote(folder), self.name)
        return about
