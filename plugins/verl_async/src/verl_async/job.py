"""From a recipe file and overrides to a validated job, and back. Needs no torch: a laptop checks a cluster's job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel

from verl_async.algorithms.algorithm import Algorithm
from verl_async.algorithms.engine_check import check_engine
from verl_async.config import AlgorithmConfig, ReadSftJob, ReadTrainJob, RolloutConfig, SftJob, TrainJob
from verl_async.data.rows import shorten
from verl_async.orchestrator.workflow import load_workflow
from verl_async.rollout.kind import ROLLOUT
from verl_engine.contract.config_file import literal, read_config, validate
from verl_engine.contract.errors import ConfigError, EngineError, UnsupportedError
from verl_engine.host.engine_section import chosen_plugin, load_engine_section
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.rollout.spec import RolloutSpec
    from verl_engine.contract.backend import BackendSpec
    from verl_engine.contract.engine_config import EngineConfig
    from verl_engine.host.engine_section import EngineSection

_Job = TypeVar("_Job", TrainJob, SftJob)
_Model = TypeVar("_Model", bound=BaseModel)

# In place of the length of a job whose own length is at fault; above any warm-up.
_UNKNOWN_STEPS: Final = 2**62
# Of what Linux takes, in bytes.
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 4095


def load_train_job(recipe: Path, overrides: Sequence[str] = ()) -> TrainJob:
    """Read and check an RL job.

    Args:
        recipe: YAML file.
        overrides: settings such as ``trainer.num_steps=10``, which win over the file.
    Returns:
        The job: ``engine.total_steps`` filled in, every path absolute.
    Raises:
        ConfigError: the file or a setting is wrong; all faults found are in the one message.
        PluginError: the engine backend cannot be used.
    """
    return _load(TrainJob, ReadTrainJob, recipe, overrides)


def load_sft_job(recipe: Path, overrides: Sequence[str] = ()) -> SftJob:
    """Read and check a supervised job; as `load_train_job`."""
    return _load(SftJob, ReadSftJob, recipe, overrides)


def resolved(job: TrainJob | SftJob) -> dict[str, Any]:
    """All settings of a job, defaults included, as plain values for YAML: loading them gives an equal job."""
    settings = literal(job.model_dump(mode="json"))
    assert isinstance(settings, dict)
    return settings


def with_steps(job: _Job, num_rows: int) -> _Job:
    """Count a job's epochs in steps.

    Args:
        job: as loaded.
        num_rows: that an epoch draws; see `verl_async.data.order.Mix`.
    Returns:
        The job with ``trainer.num_steps``, and ``engine.total_steps`` where the recipe left that out.
    Raises:
        ConfigError: the engine's schedule does not fit into so few steps.
    """
    if job.trainer.num_epochs is None:
        return job
    steps = -(-job.trainer.num_epochs * num_rows // job.rows_per_step)
    trainer = job.trainer.model_copy(update={"num_steps": steps, "num_epochs": None})
    counted = job.model_copy(update={"trainer": trainer})
    if job.engine.total_steps is not None:
        return counted
    engine = validate(type(job.engine), {**dict(job.engine), "total_steps": counted.optimizer_steps}, "engine")
    return counted.model_copy(update={"engine": engine})


def _load(
    job_class: type[_Job], read_class: type[ReadTrainJob | ReadSftJob], recipe: Path, overrides: Sequence[str]
) -> _Job:
    data = dict(read_config(recipe, overrides))
    faults: list[EngineError] = []
    rollout_spec: RolloutSpec | None = None
    try:
        data["rollout"], rollout_spec = _rollout(data.get("rollout"))
        faults += _workflow_faults(data, rollout_spec)
    except EngineError as error:
        faults.append(error)
        data["rollout"] = RolloutConfig()  # so that the other sections are looked at too
    read: ReadTrainJob | ReadSftJob | None = None
    try:
        read = validate(read_class, data)
    except ConfigError as error:
        faults.append(error)
    engine: EngineSection | None = None
    try:
        engine = _engine(data.get("engine"), (read and read.optimizer_steps) or _UNKNOWN_STEPS)
        if read is not None:
            if read.optimizer_steps is None and engine.config.total_steps == _UNKNOWN_STEPS:
                # The rows tell, when they are read; see `with_steps`.
                engine = engine._replace(config=engine.config.model_copy(update={"total_steps": None}))
            _check_data_parallel(read, engine.config)
            _check_use(engine.config, is_supervised=isinstance(read, ReadSftJob))
            _check_features(engine, read.trainer.num_ranks)
            if isinstance(read, ReadTrainJob):
                _check_old_log_probs(read, engine.spec)
            read = read.model_copy(update={"rollout": _with_experts(read.rollout, engine.config, rollout_spec)})
    except EngineError as error:
        faults.insert(0, error)
    algorithm: dict[str, AlgorithmConfig] = {}
    try:
        algorithm = _algorithm(read, engine)
    except EngineError as error:
        faults.append(error)
    if read is None or engine is None or faults:
        raise _combined(faults)
    return _with_absolute_paths(validate(job_class, {**dict(read), **algorithm, "engine": engine.config}))


def _workflow_faults(data: dict[str, Any], spec: RolloutSpec) -> list[EngineError]:
    """Load the workflow, fill in its settings, and check that the rollout engine can do what both ask for."""
    config: RolloutConfig = data["rollout"]
    faults: list[EngineError] = []
    features = config.required_features()
    try:
        loaded = load_workflow(config)
        data["rollout"] = config.model_copy(update={"workflow_config": loaded.settings})
        features += tuple(getattr(loaded.made, "features", ()))
    except EngineError as error:
        faults.append(error)
    for feature in features:
        try:
            spec.require(feature)
        except EngineError as error:
            faults.append(error)
    return faults


def _algorithm(job: ReadTrainJob | ReadSftJob | None, engine: EngineSection | None) -> dict[str, AlgorithmConfig]:
    """Check what an RL job learns, and return the section with the settings of advantage and loss filled in."""
    if not isinstance(job, ReadTrainJob):
        return {}
    algorithm = Algorithm.load(job.algorithm)
    if engine is not None:
        check_engine(algorithm, engine.config, engine.spec)
    return {"algorithm": algorithm.config}


def _check_data_parallel(job: ReadTrainJob | ReadSftJob, engine: EngineConfig) -> None:
    """Check that the ranks divide as the engine is to use them, and the sequences of a step over them."""
    num_ranks = job.trainer.num_ranks
    engine.validate_world(num_ranks)
    data_parallel_size = len(set(engine.data_parallel_ranks(num_ranks)))
    what, number = job.sequences_per_step
    if number % data_parallel_size:
        over = f"trainer.num_ranks={num_ranks}"
        if data_parallel_size < num_ranks:
            over = f"the {data_parallel_size} data-parallel ranks of {over}"
        raise ConfigError(f"{what} do not divide over {over}; make it a multiple of {data_parallel_size}")


def _check_use(engine: EngineConfig, *, is_supervised: bool) -> None:
    """Refuse what a job cannot train, or would compute for nothing."""
    faults: list[EngineError] = []
    if engine.head != "language_model":
        faults.append(
            ConfigError(
                f"engine.head={engine.head}: a job trains a language model, and a critic gives no log-probs; use "
                "language_model, and train critics in a loop of your own"
            )
        )
    if engine.forward_only:
        faults.append(
            ConfigError(
                "engine.forward_only=true: a job trains its engine, and this one could not be trained; use false, and "
                "set algorithm.kl for a reference policy"
            )
        )
    if is_supervised and engine.entropy != "off":
        faults.append(
            ConfigError(
                f"engine.entropy={engine.entropy}: the loss of a supervised job takes no entropy, so it would be "
                "computed for nothing; use off"
            )
        )
    if is_supervised and engine.router_replay:
        faults.append(
            ConfigError(
                "engine.router_replay=true: the examples of a supervised job say no experts; use false, and replay "
                "experts in an RL job, or in a loop of your own"
            )
        )
    if faults:
        raise _combined(faults)


def _with_experts(rollout: RolloutConfig, engine: EngineConfig, spec: RolloutSpec | None) -> RolloutConfig:
    """Have the rollout engine say the experts that the trainer is to use, and nothing that nobody reads."""
    if rollout.routed_experts and not engine.router_replay:
        raise ConfigError(
            "rollout.routed_experts=true: with engine.router_replay=false the trainer would not use the experts; set "
            "that to true, or leave this out"
        )
    if engine.router_replay and spec is not None:
        try:
            spec.require("routes")
        except UnsupportedError as error:
            raise UnsupportedError(f"engine.router_replay=true: {error}") from error
    if rollout.routed_experts == engine.router_replay:
        return rollout
    return rollout.model_copy(update={"routed_experts": True})


def _check_features(engine: EngineSection, num_ranks: int) -> None:
    """Refuse what the backend says it cannot do, before anything starts."""
    asked = engine.config.required_features()
    for feature in asked if num_ranks == 1 else (*asked, "multi_rank"):
        engine.spec.require(feature)


def _check_old_log_probs(job: ReadTrainJob, spec: BackendSpec) -> None:
    """Refuse a backend without snapshots where the job needs those of the weights at each sync."""
    if job.algorithm.old_log_probs != "recompute":
        return
    sync_step = job.async_training.trigger_parameter_sync_step
    if sync_step > 1:
        try:
            spec.require("snapshots")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"algorithm.old_log_probs=recompute with async_training.trigger_parameter_sync_step={sync_step} keeps "
                f"a snapshot of the weights of each sync, but {error}; use rollout, or a sync step of 1"
            ) from error


def _engine(section: object, total_steps: int) -> EngineSection:
    """Have the backend that the section names check it."""
    if section is None:
        section = {}  # left out, or nothing below its key
    if isinstance(section, Mapping) and section.get("total_steps") is None:
        section = {**section, "total_steps": total_steps}
    return load_engine_section(section, at="engine")


def _rollout(section: object) -> tuple[RolloutConfig, RolloutSpec]:
    """Have the rollout engine that the section names check it; by default the embedded one."""
    if section is None:
        section = {}
    if isinstance(section, Mapping) and "backend" not in section:
        section = {**section, "backend": RolloutConfig().backend}
    name, values = chosen_plugin(ROLLOUT, section, "rollout")
    spec: RolloutSpec = load_plugin(ROLLOUT, name, "rollout.backend").spec
    config: RolloutConfig = validate(spec.config_class, values, at="rollout")
    return config, spec


def _combined(faults: Sequence[EngineError]) -> EngineError:
    """One error for all faults; a single one keeps its own class."""
    if len(faults) == 1:
        return faults[0]
    heading = "problems in the configuration:"  # of core's own message for several problems in one section
    lines = [line.strip() for fault in faults for line in str(fault).splitlines() if not line.endswith(heading)]
    error = ConfigError("\n  ".join([f"{len(lines)} {heading}", *lines]))
    error.__cause__ = faults[0]
    return error


def _with_absolute_paths(model: _Model, at: str = "") -> _Model:
    """Make paths absolute: worker processes, and a later run of config.yaml, may start in another folder."""
    changes: dict[str, object] = {}
    for name, value in model:
        if isinstance(value, Path):
            changes[name] = _absolute(value, at + name)
        elif isinstance(value, BaseModel):
            changes[name] = _with_absolute_paths(value, f"{at}{name}.")
        elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
            changes[name] = tuple(_with_absolute_paths(item, f"{at}{name}[{i}].") for i, item in enumerate(value))
        elif isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
            changes[name] = {key: _with_absolute_paths(item, f"{at}{name}.{key}.") for key, item in value.items()}
    return model.model_copy(update=changes)


def _absolute(path: Path, at: str) -> Path:
    where = f"{at}={shorten(str(path))}"
    if "\0" in str(path):
        raise ConfigError(f"{where}: a path cannot hold the character NUL")
    try:
        absolute = path.expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{where}: there is no such user; write the folder in full") from error
    longest = max(len(os.fsencode(part)) for part in absolute.parts)
    if longest > _LONGEST_NAME or len(os.fsencode(absolute)) > _LONGEST_PATH:
        raise ConfigError(f"{where}: too long; a name may have {_LONGEST_NAME} bytes, and a whole path {_LONGEST_PATH}")
    return absolute
