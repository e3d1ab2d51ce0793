"""What can be found wrong before any process starts: files, folders, names, the reward function.

Each check raises one error that names the setting at fault. No torch, transformers or ray.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from verl_async.config import TrainJob
from verl_async.data.examples import COLUMNS as EXAMPLE_COLUMNS
from verl_async.data.examples import Conversation, read_examples
from verl_async.data.prompts import COLUMNS as PROMPT_COLUMNS
from verl_async.data.prompts import read_prompts
from verl_async.data.reward_pool import RewardPool
from verl_async.data.rewards import Sample
from verl_async.data.rows import MEDIA, list_names
from verl_async.data_config import listed
from verl_async.machine import check_port, check_processes, check_shared_memory
from verl_async.model_folder import check_model_folder, warning_on_vocabulary
from verl_async.report.output_folder import OutputFolder
from verl_async.rollout.kind import ROLLOUT
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.loading import find_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verl_async.config import SftJob
    from verl_async.data.examples import Example
    from verl_async.data.prompts import Prompt
    from verl_async.data_config import DataConfig, SftDataConfig
    from verl_async.reward_config import RewardConfig
    from verl_engine.contract.kinds import KindSpec

_MOST_TRIALS: Final = 8
"""Calls of the reward function: it may be slow, such as a judge behind a network."""


def check_train_job(job: TrainJob, output: Path | None, overwrite: bool = False) -> list[str]:
    """Check all that an RL job needs from this machine.

    Args:
        job: as loaded; its settings are valid in themselves.
        output: the folder to be made; None where nothing will be written.
        overwrite: whether results of an earlier job in it may be replaced.
    Returns:
        Remarks for the user, on what works though perhaps not as meant.
    Raises:
        EngineError: the first thing found that would make the job fail.
    """
    warnings = _check_surroundings(job, output, overwrite=overwrite)
    prompts: list[Prompt] = []
    for field, path in listed(job.data.prompts, "data.prompts"):
        columns = set[str]()
        prompts += read_prompts(path, field, found=columns)
        warnings += _warning_on_columns(f"{field}={path}", columns, PROMPT_COLUMNS)
    _check_chats(job.data, "data.prompts", any(not isinstance(prompt.prompt, str) for prompt in prompts))
    held_out, more = _read_evaluation(job)
    more += _try_reward(job.reward, [*prompts, *held_out])
    return [*warnings, *more, *_warning_on_few(len(prompts), job.rows_per_step, "data.prompts", "prompts")]


def check_sft_job(job: SftJob, output: Path | None, overwrite: bool = False) -> list[str]:
    """Check all that a supervised job needs from this machine; as `check_train_job`."""
    warnings = _check_surroundings(job, output, overwrite=overwrite)
    examples: list[Example | Conversation] = []
    for field, path in listed(job.data.examples, "data.examples"):
        columns = set[str]()
        examples += read_examples(path, field, found=columns)
        warnings += _warning_on_columns(f"{field}={path}", columns, EXAMPLE_COLUMNS)
    has_chats = any(isinstance(one, Conversation) or not isinstance(one.prompt, str) for one in examples)
    _check_chats(job.data, "data.examples", has_chats)
    if job.evaluation is not None:
        held_out, more = _read_evaluation(job)
        warnings += more + _try_reward(job.reward, held_out)
    return [*warnings, *_warning_on_few(len(examples), job.rows_per_step, "data.examples", "examples")]


def input_paths(job: TrainJob | SftJob) -> list[Path]:
    """List the files and folders that a job reads."""
    data = job.data.prompts if isinstance(job, TrainJob) else job.data.examples
    return [
        job.model.path,
        *(path for _, path in listed(data, "")),
        *(one.prompts for one in (job.evaluation.sets.values() if job.evaluation else ())),
    ]


def _check_chats(data: DataConfig | SftDataConfig, field: str, has_chats: bool) -> None:
    """Refuse settings of the chat template where nothing goes through it."""
    if data.chat_template and not has_chats:
        raise ConfigError(
            f"data.chat_template={data.chat_template}: no prompt of {field} is a chat; leave it out, or write prompts "
            "as lists of messages"
        )


def _check_surroundings(job: TrainJob | SftJob, output: Path | None, *, overwrite: bool) -> list[str]:
    """Check what both kinds of job need, the cheapest first."""
    if output is not None:
        OutputFolder.check(output, overwrite=overwrite, inputs=input_paths(job))
    check_port(job)
    check_processes(job)
    generates = isinstance(job, TrainJob) or job.evaluation is not None
    warnings = _warning_on_requirements(BACKEND, job.engine.backend, "engine.backend") + _warning_on_schedule(job)
    if generates:
        warnings += _warning_on_requirements(ROLLOUT, job.rollout.backend, "rollout.backend")
    sizes = check_model_folder(job.model.path, "model.path")
    warnings += warning_on_vocabulary(job.model.path)
    return [*warnings, *check_shared_memory(job, sizes, syncs_weights=generates)]


def _warning_on_requirements(kind: KindSpec, name: str, at: str) -> list[str]:
    """Look a plugin up without importing it; an unknown name raises.

    What it lacks is a warning, not an error: a laptop without the plugin's framework may check a cluster's job.
    """
    entry = find_plugin(kind, name, at)
    return [f"{at}={name}: {entry.label} cannot run here yet: {entry.fix}"] if entry.fix else []


def _warning_on_schedule(job: TrainJob | SftJob) -> list[str]:
    """A schedule that ends early is most often a config.yaml of an earlier job, run for more steps than that one."""
    engine, steps = job.engine, job.optimizer_steps
    if engine.lr_schedule == "constant" or steps is None or (engine.total_steps or steps) >= steps:
        return []
    warning = (
        f"engine.total_steps={engine.total_steps} is below the {steps} optimizer steps of the job: from there on the "
        f"learning rate stays at {engine.learning_rate * engine.min_lr_ratio:g}; set engine.total_steps=null to have "
        f"lr_schedule={engine.lr_schedule} end with the job"
    )
    return [warning]


def _read_evaluation(job: TrainJob | SftJob) -> tuple[list[Prompt], list[str]]:
    """Read the held-out prompts; returns warnings too."""
    found: list[Prompt] = []
    warnings = []
    for name, config in job.evaluation.sets.items() if job.evaluation else ():
        at, columns = f"evaluation.sets.{name}", set[str]()
        prompts = read_prompts(config.prompts, f"{at}.prompts", config.num_prompts, columns)
        where = f"{at}.prompts={config.prompts}"
        warnings += _warning_on_columns(where, columns, PROMPT_COLUMNS)
        if len(prompts) < config.num_prompts and "num_prompts" in config.model_fields_set:
            warnings.append(f"{where} holds {len(prompts)} prompts, fewer than {at}.num_prompts={config.num_prompts}")
        found += prompts
    return found, warnings


def _warning_on_columns(where: str, found: set[str], used: Sequence[str]) -> list[str]:
    """Name the columns that nothing reads; verl's own ``ability`` is none that verl reads either."""
    unused = sorted(found - {*used, "ability", *MEDIA})
    return [f"{where}: nothing reads the columns {list_names(unused)}"] if unused else []


def _try_reward(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Score the ground truth of the first prompt of each data source: reward functions often choose by it.

    Returns:
        Remarks: data sources that no prompt has; and what failed, where that does not stop the job.
    """
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.data_source, prompt)
    samples = [
        # The score itself says nothing: many functions expect more around an answer than the bare ground truth.
        Sample(prompt, str(prompt.ground_truth), f"{prompt.index} of {prompt.data_source}, tried before the start")
        for prompt in list(firsts.values())[:_MOST_TRIALS]
    ]
    warnings = [
        f"{at}.data_sources: no prompt has the data_source {name!r}"
        for at, function in config.all_functions
        for name in sorted(set(function.data_sources or ()) - firsts.keys())
    ]

    async def score() -> list[str]:
        pool = RewardPool(config)
        pool.check_sources(firsts)
        async with pool:
            return [error for sample in samples for error in (await pool.score(sample)).errors]

    return warnings + asyncio.run(score())


def _warning_on_few(found: int, wanted: int, where: str, what: str) -> list[str]:
    """Fewer rows than one step takes still train, for the order goes on into the next pass over the file."""
    if found >= wanted:
        return []
    warning = f"{where} holds {found} {what}, fewer than the {wanted} of one training step: it sees some more than once"
    return [warning]
