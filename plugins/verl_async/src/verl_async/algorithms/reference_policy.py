"""The engine of the reference policy, where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_async.algorithms.algorithm import Algorithm
from verl_async.config import TrainJob
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate

if TYPE_CHECKING:
    from verl_async.config import SftJob
    from verl_engine.contract.engine_config import EngineConfig


def reference_engine(job: TrainJob | SftJob) -> EngineConfig | None:
    """Return the config of a forward-only engine beside the one that is trained.

    None where nothing reads its log-probs, or an adapter is trained: then the model without it is the reference.
    """
    if (
        not isinstance(job, TrainJob)
        or job.engine.lora is not None
        or not Algorithm.load(job.algorithm).needs_reference
    ):
        return None
    return forward_only(job.engine)


def forward_only(engine: EngineConfig) -> EngineConfig:
    """Return the same engine without training.

    Raises:
        ConfigError: a setting of it does not go with ``forward_only``.
    """
    settings = {name: getattr(engine, name) for name in engine.model_fields_set}
    changes = {"forward_only": True, "entropy": "off", "observers": ()}
    try:
        return validate(type(engine), {**settings, **changes}, "engine")
    except ConfigError as error:
        raise ConfigError(
            f"the reference policy that the algorithm needs is this engine with forward_only=true, and {error}"
        ) from error
