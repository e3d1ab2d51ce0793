"""The trainer ranks as Ray actors, and all of them as one `Trainer`."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from verl_async.orchestrator.actors import BucketDelivery
from verl_async.orchestrator.data_parallel import DataParallelRanks
from verl_async.orchestrator.shared_slots import SharedMemoryTransport
from verl_async.orchestrator.trainer_host import TrainerHost
from verl_async.orchestrator.waiting import within
from verl_async.ray.answers import answer, answers
from verl_async.ray.local_cluster import LOOPBACK
from verl_async.ray.notes import notes_of_packages
from verl_async.rollout.in_process import InlineTransport
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.worker import EngineWorker

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.config import SftTrainerConfig, TrainerConfig
    from verl_async.orchestrator.actors import RankBatches
    from verl_async.rollout.interface import WeightTransport
    from verl_engine.batch.sequence import Sequence
    from verl_engine.contract.engine_config import EngineConfig
    from verl_engine.engine.base import LossFn
    from verl_engine.engine.train_step import Normalizer, StepReport
    from verl_engine.engine.weights.bucket import WeightBucket


_LOOPBACK_INTERFACE: Final = "lo"


class TrainerActor:
    """One rank; blocking methods, called one after the other."""

    def __init__(
        self,
        config: EngineConfig,
        model_folder: Path,
        rank: int,
        num_ranks: int,
        reference: EngineConfig | None = None,
    ) -> None:
        """Remember what to do: an error raised here would reach the driver as the text of a dead actor only.

        Args:
            config: of the engine that is trained.
            model_folder: of both engines.
            rank: of the trainer.
            num_ranks: of the trainer.
            reference: of an engine for the reference policy; None where there is none, or an adapter tells them apart.
        """
        self._config = config
        self._model_folder = model_folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._reference_config = reference

    def node_id(self) -> str:
        """Return the id of the node this rank was placed on."""
        return str(ray.get_runtime_context().get_node_id())

    def address(self, port: int | None) -> str:
        """Return where the process group can meet on this node.

        Args:
            port: as configured, or None for a free one. It is taken at once: imports lie before the group is made,
                and any process of the machine may be given a port that was free.
        """
        host = ray.util.get_node_ip_address()
        # A server that torch opens itself listens on every interface of the machine.
        try:
            listener = socket.create_server((host, port or 0))
        except OSError as error:
            raise ConfigError(
                f"trainer.master_port={port} cannot be used on {host} ({error.strerror}); leave it out to take a free "
                "port, or choose another one"
            ) from error
        port = listener.getsockname()[1]
        # With multi_tenant the group of this process finds the server by its port, and uses it.
        self._rendezvous = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        return f"tcp://{host}:{port}"

    def start(self, init_method: str, timeout_s: float) -> list[str]:
        """Load the backend, join the process group and build the engine.

        Returns:
            What the backend logged meanwhile, such as which gradient sync it chose and why.
        """
        if (urlparse(init_method).hostname or "") == LOOPBACK:
            # All ranks are on this machine, and nothing beyond it need reach them.
            os.environ.update(GLOO_SOCKET_IFNAME=_LOOPBACK_INTERFACE, NCCL_SOCKET_IFNAME=_LOOPBACK_INTERFACE)
        self._worker = EngineWorker(self._config, self._model_folder, self._rank, self._num_ranks)
        self._host = TrainerHost(self._worker, self._rank)
        self._worker.prepare(init_method, timeout_s)
        with notes_of_packages("verl_engine", type(self._config).__module__.partition(".")[0]) as notes:
            self._worker.create("actor")
        self._reference: EngineWorker | None = None
        if self._reference_config is not None:
            self._reference = EngineWorker(self._reference_config, self._model_folder, self._rank, self._num_ranks)
            self._reference.prepare(init_method, timeout_s)
            self._reference.create("reference")
        return notes

    def train_batch(
        self, micro_batches: list[list[Sequence]], loss_fn: LossFn, temperature: float, normalizer: Normalizer
    ) -> StepReport:
        """See `EngineWorker.train_batch`."""
        return self._worker.train_batch(micro_batches, loss_fn, temperature, normalizer=normalizer)

    def infer_batch(
        self, micro_batches: list[list[Sequence]], temperature: float, tag: str | None
    ) -> list[list[npt.NDArray[np.float32]]]:
        """See `EngineWorker.infer_batch`."""
        return self._worker.infer_batch(micro_batches, temperature, tag=tag)

    def infer_reference(
        self, micro_batches: list[list[Sequence]], temperature: float
    ) -> list[list[npt.NDArray[np.float32]]]:
        """Compute log-probs of the model that training began with; see `EngineWorker.infer_batch`."""
        if self._reference is not None:
            return self._reference.infer_batch(micro_batches, temperature)
        return self._worker.infer_batch(micro_batches, temperature, disable_adapter=True)

    def keep_weights(self, tag: str) -> None:
        """See `EngineWorker.save_model_to_cpu`."""
        self._worker.save_model_to_cpu(tag)

    def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """See `TrainerHost.plan_weight_buckets`."""
        return self._host.plan_weight_buckets(bucket_bytes, dtype)

    def open_slots(self) -> list[str]:
        """See `TrainerHost.open_slots`."""
        return self._host.open_slots()

    def unlink_slots(self) -> None:
        """See `TrainerHost.unlink_slots`."""
        self._host.unlink_slots()

    def write_weight_bucket(self, index: int, slot: int) -> tuple[int | npt.NDArray[np.uint8], int]:
        """See `TrainerHost.write_weight_bucket`."""
        return self._host.write_weight_bucket(index, slot)

    def save_pretrained(self, folder: Path) -> None:
        """See `EngineWorker.save_pretrained`."""
        self._worker.save_pretrained(folder)

    def close(self) -> None:
        """Leave the process group."""
        if self._reference is not None:
            self._reference.close()
        self._worker.close()


class RayTrainer:
    """All ranks as one `Trainer`."""

    def __init__(
        self,
        engine: EngineConfig,
        model_folder: Path,
        config: TrainerConfig | SftTrainerConfig,
        options: dict[str, Any],
        reference: EngineConfig | None = None,
    ) -> None:
        """Start the actors; `start` waits for them."""
        self._data_ranks = DataParallelRanks(engine.data_parallel_ranks(config.num_ranks))
        self.data_parallel_size = self._data_ranks.count
        self._config = config
        self._names = [f"trainer rank {rank}" for rank in range(config.num_ranks)]
        self.shares_memory = False
        """Whether weights travel through memory that this machine's processes share; else in Ray's object store."""
        self._transport: SharedMemoryTransport | None = None
        self._is_linked = False
        self.node_id = ""
        self.notes: list[str] = []
        """What the first rank's backend logged when it built the engine."""
        actor = ray.remote(TrainerActor)
        self.actors: list[Any] = [
            actor.options(**options).remote(engine, model_folder, rank, config.num_ranks, reference)
            for rank in range(config.num_ranks)
        ]

    async def place(self) -> None:
        """Wait until every rank has a process on a node with the accelerator it needs."""
        self.node_id, *_ = await within(
            self._config.timeout_s, "the trainer ranks did not all get a process", self._all("node_id")
        )

    async def start(self) -> None:
        """Bring all ranks into one process group and build the engines."""
        await self.place()
        timeout_s, first = self._config.timeout_s, self._names[0]
        address = await within(
            timeout_s,
            f"{first} did not find a port",
            answer(self.actors[0].address.remote(self._config.master_port), first),
        )
        self.notes, *_ = await within(
            timeout_s, "the trainer ranks did not build their engines", self._all("start", address, timeout_s)
        )

    async def open_transport(self) -> WeightTransport:
        """Lay buckets into shared memory where `shares_memory` says so; the first time, slots are made.

        Raises:
            WeightsError: there is not enough room for two buckets.
        """
        if not self.shares_memory:
            return InlineTransport()
        if self._transport is None:
            first, name = self.actors[0], self._names[0]
            self._is_linked = True
            paths = await within(
                self._config.timeout_s, f"{name} did not make buffers", answer(first.open_slots.remote(), name)
            )
            self._transport = SharedMemoryTransport(tuple(paths))
        return self._transport

    async def release_transport(self) -> None:
        """Remove the slots' names."""
        if self._is_linked:
            self._is_linked = False
            await answer(self.actors[0].unlink_slots.remote(), self._names[0])

    async def train_batch(
        self, batches: RankBatches, loss_fn: LossFn, temperature: float, normalizer: Normalizer = "tokens"
    ) -> StepReport:
        """Make one optimizer step; every rank reports the same."""
        reports = await self._each("train_batch", batches, loss_fn, temperature, normalizer)
        report: StepReport = reports[0]
        return report

    async def infer_batch(
        self, batches: RankBatches, temperature: float, tag: str | None = None
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs; ranks that compute one share find the same."""
        return self._data_ranks.from_ranks(await self._each("infer_batch", batches, temperature, tag))

    async def infer_reference(
        self, batches: RankBatches, temperature: float
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs of the reference policy."""
        return self._data_ranks.from_ranks(await self._each("infer_reference", batches, temperature))

    async def keep_weights(self, tag: str) -> None:
        """Keep every rank's part of the weights aside."""
        await self._all("keep_weights", tag)

    async def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """Divide the weights into buckets, on every rank alike."""
        plan: list[WeightBucket] = (await self._all("plan_weight_buckets", bucket_bytes, dtype))[0]
        return plan

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        """Gather a bucket; its bytes stay in shared memory or in Ray's object store."""
        first = self.actors[0]
        payload, checksum = first.write_weight_bucket.options(num_returns=2).remote(index, slot)
        others = [actor.write_weight_bucket.remote(index, slot) for actor in self.actors[1:]]
        found, *_ = await answers([checksum, *others], self._names)
        return BucketDelivery(payload, found)

    async def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        await within(self._config.timeout_s, "the trainer did not save the model", self._all("save_pretrained", folder))

    async def close(self) -> None:
        """Leave the process group; the cluster ends the actors."""
        await within(30.0, "the trainer ranks did not leave their process group", self._all("close"))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call every rank with the same arguments."""
        return await answers([getattr(actor, method).remote(*args) for actor in self.actors], self._names)

    async def _each(self, method: str, batches: RankBatches, *args: Any) -> list[Any]:
        """Call every rank with the batches of its share."""
        own = zip(self.actors, self._data_ranks.to_ranks(batches), strict=True)
        return await answers([getattr(actor, method).remote(batch, *args) for actor, batch in own], self._names)
