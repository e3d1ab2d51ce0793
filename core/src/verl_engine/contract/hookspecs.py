"""The hooks: what core asks of an engine backend. A backend's hooks module implements them with ``@hookimpl``.

Each docstring says what the hook does, and when and in which process it runs. Only ``engine_create`` is required: the
core fills in a default for each of the others that a backend does not implement. A hook has exactly one implementation,
so one that returns None, where something is to be returned, is an error.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.markers import hookspec
from verl_engine.contract.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from verl_engine.engine.base import Engine
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot


@hookspec
def engine_prepare_process(config: EngineConfig) -> None:
    """Make the process ready: environment variables and monkey patches belong here, and nowhere else.

    When and where: first in every worker process, before the backend's framework is imported. Optional.

    Args:
        config: the validated ``engine`` section.
    """


@hookspec(firstresult=True)
def engine_create(config: EngineConfig, model_folder: Path, role: str) -> Engine:  # type: ignore[empty-body]
    """Build the model, its optimizer and schedule on this rank.

    When and where: once a role in each worker process, after the process group is up. Required.

    Args:
        config: the validated ``engine`` section.
        model_folder: a Hugging Face model folder (config.json, safetensors).
        role: what the engine is for, such as ``actor``; for messages.
    Returns:
        The engine, weights loaded, gradients zero.
    Raises:
        ModelError: the folder does not hold a model that this backend can run.
    Collectives: any; every rank calls it.
    """


@hookspec(firstresult=True)
def engine_gradient_sync(engine: Engine, is_last_micro_batch: bool) -> AbstractContextManager[None]:  # type: ignore[empty-body]
    """Decide whether this micro-batch's backward reduces gradients over the data-parallel ranks.

    When and where: the context encloses the forward AND the backward of one micro-batch. Optional; by default
    `Engine.gradient_sync`.

    Args:
        engine: what ``engine_create`` returned.
        is_last_micro_batch: True for the last micro-batch of an optimizer step. After it the gradients must be
            reduced and complete.
    Returns:
        A fresh context manager. An exception inside it must leave nothing switched off.
    """


@hookspec(firstresult=True)
def engine_optimizer_step(engine: Engine, learning_rate: float | None) -> OptimizerStep:  # type: ignore[empty-body]
    """Clip the accumulated gradient, step the optimizer and the schedule, zero the gradient.

    When and where: after the last micro-batch. Optional; by default `Engine.optimizer_step`. If the norm is not finite
    on any rank, every rank skips: weights, optimizer state and schedule stay as they were, and ``applied`` is False.

    Args:
        engine: what ``engine_create`` returned.
        learning_rate: used as it is, for this step; None for the schedule's rate. The schedule goes on by one step in
            either case.
    Returns:
        What the step did; equal on every rank.
    Collectives: all-reduces of the squared norm.
    """


@hookspec(firstresult=True)
def engine_copy_weights_to_cpu(engine: Engine, snapshot: WeightSnapshot) -> WeightSnapshot:  # type: ignore[empty-body]
    """Copy this rank's weights into storage that nothing else uses.

    When and where: between optimizer steps, on every rank. Optional; by default the snapshot stores
    `Engine.local_weights`.

    Args:
        engine: what ``engine_create`` returned.
        snapshot: fill it with ``snapshot.store(names_and_tensors)``: this rank's shards of all parameters that are
            trained, and all buffers, live. The copy is the snapshot's own, whatever device the tensors are on; if it is
            known to hold these values, nothing is copied.
    Returns:
        `snapshot`.
    Collectives: none.
    """


@hookspec(firstresult=True)
def engine_restore_weights_from_cpu(engine: Engine, snapshot: WeightSnapshot) -> bool:  # type: ignore[empty-body]
    """Make the weights of a snapshot the current ones again; optimizer and schedule stay as they are.

    When and where: between optimizer steps, on every rank. Optional; by default the snapshot is copied into
    `Engine.local_weights`.

    Args:
        engine: what ``engine_create`` returned.
        snapshot: was filled by this engine; copy from it with ``snapshot.copy_into(names_and_tensors)``, which checks
            names, shapes and dtypes before it copies anything.
    Returns:
        True, so that the call is known to be handled.
    Collectives: none.
    """
