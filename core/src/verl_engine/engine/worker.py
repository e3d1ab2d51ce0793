"""One rank's engine behind plain methods, which take and give Python and numpy: what any launcher drives."""

import dataclasses
import os
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.choices import require_choice
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError, PluginError, TrainingDivergedError, UnsupportedError
from verl_engine.engine.base import DataParallel, Engine, LossFn
from verl_engine.engine.checkpoints.store import CheckpointInfo, CheckpointStore
from verl_engine.engine.completeness import require_complete
from verl_engine.engine.device import Device
from verl_engine.engine.process_group import SharedGroup
from verl_engine.engine.snapshots.manager import Snapshots
from verl_engine.engine.snapshots.shared import SnapshotHandle
from verl_engine.engine.temperature import temperature_of
from verl_engine.engine.token_output import OutputName
from verl_engine.engine.train_step import Normalizer, StepReport, require_usable, train_step
from verl_engine.engine.weights.bucket import WeightBucket, plan_buckets, write_bucket
from verl_engine.host.backend_host import BackendHost


class EngineWorker:
    """Call `prepare`, then `create`, then the rest; every rank of the world makes the same calls in the same order."""

    def __init__(self, config: EngineConfig, model_folder: Path, rank: int = 0, world_size: int = 1) -> None:
        """Remember what to do; nothing is imported or started yet."""
        self._config = config
        self._model_folder = model_folder
        self._rank = rank
        self._world_size = world_size
        self._host = BackendHost.load(config.backend, observers=config.observers)
        if world_size > 1:
            self._host.require("multi_rank")
        for feature in config.required_features():
            self._host.require(feature)
        self._engine: Engine | None = None
        self._skipped_in_a_row = 0
        self._snapshots: Snapshots | None = None
        self._checkpoints: CheckpointStore | None = None
        self._timeout_s = 600.0
        self._group: SharedGroup | None = None

    def prepare(self, init_method: str | None = None, timeout_s: float = 600.0) -> None:
        """Make the process ready, then join the process group; workers of one process share one, with its time limit.

        Args:
            init_method: of torch.distributed, such as ``tcp://10.0.0.1:29500``; not used where the process is in a
                group.
            timeout_s: for joining, and for each collective later.
        Raises:
            ConfigError: the process is in a group of another size, rank or backend, or in none that it could use.
        """
        self._timeout_s = timeout_s
        self._host.prepare_process(self._config)
        torch.set_num_threads(self._config.num_threads)
        device = Device.resolve(self._config.device, int(os.environ.get("LOCAL_RANK", self._rank)))
        device.activate()
        if self._group is None:
            self._group, is_first = SharedGroup.join(device, init_method, self._rank, self._world_size, timeout_s)
            if is_first:  # or a worker that comes later would repeat what others have drawn
                torch.manual_seed(self._config.seed + self._rank)

    def create(self, role: str = "actor") -> None:
        """Build the engine from the model folder.

        Raises:
            ConfigError: the ranks cannot be divided as configured.
            PluginError: the engine lacks methods, or has another data-parallel rank, than its backend says.
        """
        self._config.validate_world(self._world_size)
        with nullcontext() if self._group is None else self._group.owning():
            engine = self._host.create(self._config, self._model_folder, role)
        require_complete(engine, self._host, self._world_size)
        self._check_data_parallel(engine.data_parallel)
        self._engine = engine

    def _check_data_parallel(self, found: DataParallel) -> None:
        """Launchers divide batches by the config, the engine sums over its group: both must mean the same ranks."""
        ranks = self._config.data_parallel_ranks(self._world_size)
        own, count = ranks[self._rank], len(set(ranks))
        if (found.rank, found.size) != (own, count):
            raise PluginError(
                f"backend {self._config.backend}: the engine of rank {self._rank} has data_parallel rank {found.rank} "
                f"of {found.size}, but {type(self._config).__name__}.data_parallel_ranks({self._world_size}), "
                f"{ranks}, gives it {own} of {count}; it would train on batches that are not meant for it. This "
                "is a bug of the backend: fix whichever is wrong"
            )

    @property
    def engine(self) -> Engine:
        """The engine, after `create`."""
        if self._engine is None:
            raise RuntimeError("EngineWorker.create() has not been called on this rank")
        return self._engine

    def train_batch(
        self,
        micro_batches: SequenceOf[list[Sequence]],
        loss_fn: LossFn,
        temperature: float = 1.0,
        *,
        normalizer: Normalizer = "tokens",
        learning_rate: float | None = None,
    ) -> StepReport:
        """Make one optimizer step over this rank's micro-batches; see `train_step`.

        Raises:
            UnsupportedError: the engine is forward-only.
            TrainingDivergedError: ``max_skipped_steps`` steps in a row had a gradient that is not finite.
        """
        if self._config.forward_only:
            raise UnsupportedError("engine.forward_only=true: this engine has no optimizer and cannot train")
        device = self.engine.device.torch_device
        packed = [PackedBatch.from_sequences(sequences, device) for sequences in micro_batches]
        report = train_step(
            self._host, self.engine, packed, loss_fn, temperature, normalizer=normalizer, learning_rate=learning_rate
        )
        report = dataclasses.replace(report, metrics=report.metrics | self._host.metrics())
        if report.optimizer.applied:
            self._skipped_in_a_row = 0
        elif not report.optimizer.overflow:
            self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._config.max_skipped_steps:
            raise TrainingDivergedError(
                f"the gradient was not finite (norm {report.optimizer.grad_norm}) in {self._skipped_in_a_row} "
                "optimizer steps in a row (engine.max_skipped_steps); weights are those before them. Lower "
                f"engine.learning_rate={self._config.learning_rate}, or look at the rewards and log-probs of the last "
                "batches"
            )
        return report

    def infer_batch(
        self,
        micro_batches: SequenceOf[list[Sequence]],
        temperature: float = 1.0,
        *,
        disable_adapter: bool = False,
        tag: int | str | None = None,
    ) -> list[list[npt.NDArray[np.float32]]]:
        """Compute log-probs, or a critic's values, in eval mode and without gradient.

        Args:
            micro_batches: this rank's; every rank brings the same number.
            temperature: divides the logits before the softmax; sequences with a field ``temperature`` have their own.
            disable_adapter: run the model without its LoRA adapter, as the reference policy it started from.
            tag: of `save_model_to_cpu`, to compute under the weights kept there; the current ones come back.
        Returns:
            For each micro-batch and sequence, in the order given, [L] float32: log-probs in nats, or values; 0 outside
                the loss mask.
        """
        name: OutputName = "values" if self._config.head == "value" else "log_probs"
        found = self.infer_outputs(micro_batches, (name,), temperature, disable_adapter=disable_adapter, tag=tag)
        return [[outputs[name] for outputs in of_sequences] for of_sequences in found]

    def infer_outputs(
        self,
        micro_batches: SequenceOf[list[Sequence]],
        names: SequenceOf[OutputName],
        temperature: float = 1.0,
        *,
        disable_adapter: bool = False,
        tag: int | str | None = None,
        top_k: int = 0,
    ) -> list[list[dict[str, npt.NDArray[Any]]]]:
        """Compute properties of `TokenOutput`, by their names, in eval mode and without gradient; see `infer_batch`.

        With `top_k` so many of the most likely ids are found, as a teacher does; at 0, log-probs are of those that
        sequences have in ``top_k_ids``.
        Returns:
            For each micro-batch and sequence, in the order given, the arrays by name, [L] or [L, ...].
        Raises:
            UnsupportedError: the config does not ask for one of them, or the backend declares the gap.
            ConfigError: a name is another one.
            BatchError: `top_k` is negative, or the vocabulary does not have so many ids, or not a token's.
        """
        for name in names:
            require_choice("name", name, OutputName)
        engine = self.engine
        engine.set_training(False)
        results: list[list[dict[str, npt.NDArray[Any]]]] = []
        with (
            torch.no_grad(),
            nullcontext() if tag is None else self._snapshots_of_engine().swapped(str(tag)),
            engine.disable_adapter() if disable_adapter else nullcontext(),
        ):
            for sequences in micro_batches:
                batch = PackedBatch.from_sequences(sequences, engine.device.torch_device, top_k)
                require_usable(self._host, engine, [batch])
                output = engine.forward(batch, temperature_of(batch, temperature))
                parts = {name: batch.unpack(getattr(output, name).cpu()) for name in names}
                results.append(
                    [{name: parts[name][index].numpy().copy() for name in names} for index in range(len(sequences))]
                )
        return results

    def save_model_to_cpu(self, tag: int | str, version: int = 0) -> None:
        """Save a snapshot of the current weights under a tag; see `Snapshots.save`."""
        self._snapshots_of_engine().save(str(tag), version)

    def restore_model_from_cpu(self, tag: int | str) -> None:
        """Make the weights of a tag the current ones again; see `Snapshots.restore`."""
        self._snapshots_of_engine().restore(str(tag))

    def clear_cpu_model(self, tag: int | str) -> None:
        """Forget a tag; see `Snapshots.drop`."""
        self._snapshots_of_engine().drop(str(tag))

    def snapshot_handle(self, tag: int | str) -> SnapshotHandle:
        """Return by what another process of the machine reads a tag of this rank; see `Snapshots.handle`."""
        return self._snapshots_of_engine().handle(str(tag))

    def save_checkpoint(
        self,
        root: Path,
        step: int,
        user_state: dict[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        wait: bool = False,
    ) -> None:
        """Write all state, in the background unless `wait`; see `CheckpointStore` for the rest."""
        self._checkpoints_in(root, keep_last).save(self.engine, step, user_state, wait=wait)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is whole; see `CheckpointStore.wait`."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def load_checkpoint(self, root: Path, step: int | None = None) -> CheckpointInfo:
        """Resume from a checkpoint, by default the newest; see `CheckpointStore.load`."""
        return self._checkpoints_in(root).load(self.engine, step)

    def _checkpoints_in(self, root: Path, keep_last: int | None = None) -> CheckpointStore:
        """Return the store of a folder; another folder's is closed."""
        self._host.require("checkpoints")
        if self._checkpoints is None or self._checkpoints.root != root:
            former, self._checkpoints = self._checkpoints, None
            if former is not None:
                former.close()
            self._checkpoints = CheckpointStore(root, model_folder=self._model_folder, timeout_s=self._timeout_s)
        self._checkpoints.keep_last = keep_last
        return self._checkpoints

    def plan_weight_buckets(
        self, bucket_bytes: int, dtype: str | None = None, *, adapter_only: bool = False
    ) -> list[WeightBucket]:
        """Plan the export of all weights, or of the adapter's alone; the same on every rank. See `plan_buckets`.

        Args:
            bucket_bytes: size of a bucket.
            dtype: that weights are cast to, such as ``bfloat16``, but for `Engine.held_dtypes`; by default they keep
                their own.
            adapter_only: unmerged, under peft's names: see `Engine.adapter_specs`, and `Engine.adapter_config`.
        Raises:
            ConfigError: the dtype is none of floating-point numbers.
            UnsupportedError: `adapter_only`, and there is no adapter.
        """
        kind = getattr(torch, dtype, None) if dtype else None
        if dtype and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise ConfigError(f"dtype={dtype} is no dtype that weights can be cast to; use one such as bfloat16")
        held = self.engine.held_dtypes(kind) if kind else {}
        specs = self.engine.adapter_specs() if adapter_only else self.engine.weight_specs()
        return plan_buckets(specs, bucket_bytes, kind, held)

    def write_weight_bucket(self, bucket: WeightBucket, buffer: npt.NDArray[np.uint8] | None) -> int:
        """Gather one bucket; see `write_bucket`. Ranks without a buffer only take part."""
        return write_bucket(self.engine, bucket, buffer)

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; every rank calls it, the first writes."""
        self.engine.save_pretrained(folder)

    def _snapshots_of_engine(self) -> Snapshots:
        if self._snapshots is None:
            config = self._config
            self._snapshots = Snapshots(self._host, self.engine, config.snapshot_memory, config.snapshot_limit_bytes)
        return self._snapshots

    def close(self) -> None:
        """Wait for a checkpoint that is being written, then leave the process group. Harmless when called twice.

        With the last worker of the process ends what they made: the group, if a worker started it, else the further
        groups of their engines.
        """
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._engine = self._snapshots = None
        group, self._group = self._group, None
        if group is not None:
            group.leave()
