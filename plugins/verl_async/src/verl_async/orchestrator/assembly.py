"""Putting a job's loops together around a trainer and rollout workers, wherever those run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from verl_async.algorithms.algorithm import Algorithm
from verl_async.orchestrator.async_training import AsyncTraining
from verl_async.orchestrator.dispatcher import Dispatcher
from verl_async.orchestrator.evaluation import SEED, Evaluation, EvaluationSet
from verl_async.orchestrator.policy_update import PolicyUpdate
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.staleness import StalenessBudget, prompts_between_syncs
from verl_async.orchestrator.supervised_training import SupervisedTraining
from verl_async.orchestrator.weight_sync import WeightSync
from verl_async.orchestrator.workflow import load_workflow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_async.config import SftJob, TrainJob
    from verl_async.data.order import Mix
    from verl_async.orchestrator.actors import RolloutClient, Trainer
    from verl_async.orchestrator.inputs import ModelTexts
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.samples import EncodedPrompt
    from verl_async.orchestrator.scoring import Scorer
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.orchestrator.workflow import Workflow
    from verl_async.rollout.interface import SamplingParams
    from verl_engine.batch import sequence

    HeldOut = Mapping[str, Sequence[EncodedPrompt]]
    """Prompts of each evaluation set."""


@dataclass(frozen=True, slots=True)
class Actors:
    """Who does the work."""

    trainer: Trainer
    rollouts: Sequence[RolloutClient]


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who observes."""

    listener: JobListener
    timeline: Timeline


def assemble_training(
    job: TrainJob,
    texts: ModelTexts,
    prompts: Sequence[EncodedPrompt],
    held_out: HeldOut,
    actors: Actors,
    watchers: Watchers,
    mix: Mix | None = None,
) -> AsyncTraining:
    """Build the fully-async job."""
    workers = _workers(job, actors, watchers)
    per_step = job.async_training.require_batches * job.trainer.mini_batch_size
    limit = prompts_between_syncs(job.async_training, job.trainer.mini_batch_size)
    budget = StalenessBudget(limit, per_step * job.trainer.steps)
    queue = SampleQueue(job.async_training.queue_size or limit)
    source = PromptSource(prompts, job.data.seed, job.data.shuffle, mix)
    algorithm = Algorithm.load(job.algorithm)
    every_prompt = chain(prompts, *held_out.values())
    scorer = texts.scorer(job.reward, every_prompt, watchers.listener.on_note, watchers.timeline)
    weights = _weight_sync(job, actors.trainer, workers, interrupt=job.async_training.partial_rollout)
    on_policy = job.async_training.staleness_threshold == 0
    evaluation = _evaluation(job, texts, held_out, workers, watchers, scorer, stops_training=on_policy)
    dispatcher = Dispatcher(
        workers=workers,
        source=source,
        budget=budget,
        queue=queue,
        sampler=_sampler(job, texts, scorer, texts.sampling(job.rollout), job.data.seed),
        config=job.rollout,
        put_timeout_s=_longest_step_s(job, algorithm) + (evaluation.timeout_s if evaluation else 0.0),
    )
    return AsyncTraining(
        job=job,
        workers=workers,
        dispatcher=dispatcher,
        queue=queue,
        budget=budget,
        update=PolicyUpdate(
            actors.trainer,
            job.trainer,
            algorithm,
            job.rollout.temperature,
            job.async_training.trigger_parameter_sync_step,
            with_experts=job.engine.router_replay,
        ),
        weights=weights,
        scorer=scorer,
        evaluation=evaluation,
        timeline=watchers.timeline,
        listener=watchers.listener,
    )


def assemble_supervised(
    job: SftJob,
    texts: ModelTexts,
    examples: list[sequence.Sequence],
    held_out: HeldOut,
    actors: Actors,
    watchers: Watchers,
    mix: Mix | None = None,
) -> SupervisedTraining:
    """Build the supervised job; without evaluation it needs no rollout workers."""
    workers = _workers(job, actors, watchers)
    scorer = texts.scorer(
        job.reward, chain.from_iterable(held_out.values()), watchers.listener.on_note, watchers.timeline
    )
    evaluation = _evaluation(job, texts, held_out, workers, watchers, scorer, stops_training=False)
    weights = _weight_sync(job, actors.trainer, workers, interrupt=False)
    return SupervisedTraining(
        job=job,
        examples=examples,
        trainer=actors.trainer,
        evaluation=(evaluation, weights) if evaluation else None,
        timeline=watchers.timeline,
        listener=watchers.listener,
        mix=mix,
    )


def _workers(job: TrainJob | SftJob, actors: Actors, watchers: Watchers) -> list[RolloutWorker]:
    return [RolloutWorker(client, watchers.timeline, job.rollout.timeout_s) for client in actors.rollouts]


def _sampler(job: TrainJob | SftJob, texts: ModelTexts, scorer: Scorer, sampling: SamplingParams, seed: int) -> Sampler:
    workflow: Workflow = load_workflow(job.rollout).made
    limit_s, with_experts = job.rollout.workflow_timeout_s, job.rollout.routed_experts
    return Sampler(workflow, scorer, sampling, seed, texts.chat_settings, limit_s, with_experts=with_experts)


def _longest_step_s(job: TrainJob, algorithm: Algorithm) -> float:
    """Return how long update and sync may take, each at its limits."""
    is_recomputed = job.algorithm.old_log_probs == "recompute"
    num_calls = job.async_training.require_batches * (1 + is_recomputed + algorithm.needs_reference)
    num_calls += is_recomputed  # of the weights of a sync a snapshot is taken
    sync_s = 2 * job.weight_sync.timeout_s + job.rollout.timeout_s
    return num_calls * job.trainer.timeout_s + sync_s


def _weight_sync(
    job: TrainJob | SftJob, trainer: Trainer, workers: list[RolloutWorker], *, interrupt: bool
) -> WeightSync:
    return WeightSync(
        trainer=trainer,
        workers=workers,
        config=job.weight_sync,
        dtype=job.rollout.dtype,
        interrupt=interrupt,
        generation_timeout_s=job.rollout.timeout_s,
    )


def _evaluation(
    job: TrainJob | SftJob,
    texts: ModelTexts,
    held_out: HeldOut,
    workers: list[RolloutWorker],
    watchers: Watchers,
    scorer: Scorer,
    *,
    stops_training: bool,
) -> Evaluation | None:
    if job.evaluation is None:
        return None
    sets = []
    for name, config in job.evaluation.sets.items():
        sampler = _sampler(job, texts, scorer, texts.sampling(job.rollout, config), SEED)
        sets.append(EvaluationSet(name, config, held_out[name], replace(sampler, held_out=name)))
    num_samples = sum(one.num_samples for one in sets)
    num_batches = -(-num_samples // (job.rollout.num_workers * job.rollout.max_batch_prompts * job.rollout.n))
    has_aim = any(one.config.stop_at_exact_match is not None for one in sets)
    return Evaluation(
        sets=sets,
        workers=workers,
        timeline=watchers.timeline,
        listener=watchers.listener,
        every_steps=job.evaluation.every_steps,
        rollout=job.rollout,
        stops_training=stops_training or job.rollout.deterministic or has_aim,
        # One batch more: training prompts are answered beside.
        timeout_s=(num_batches + 1) * (job.rollout.timeout_s + job.rollout.workflow_timeout_s)
        + job.reward.longest_s(num_samples),
    )
