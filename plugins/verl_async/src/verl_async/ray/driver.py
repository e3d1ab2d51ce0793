"""Runs a job on Ray: reads its inputs, starts the actors, runs the loops, saves the model, ends everything."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from verl_async.algorithms.reference_policy import reference_engine
from verl_async.job import with_steps
from verl_async.orchestrator.assembly import Actors, Watchers, assemble_supervised, assemble_training
from verl_async.orchestrator.inputs import (
    ModelTexts,
    read_evaluation_prompts,
    read_training_examples,
    read_training_prompts,
)
from verl_async.orchestrator.saving import ModelSaver
from verl_async.orchestrator.waiting import within
from verl_async.ray.cluster import ray_cluster
from verl_async.ray.resources import ActorNeeds, divide_resources
from verl_async.ray.rollout import RayRolloutClient
from verl_async.ray.trainer import RayTrainer
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_async.config import SftJob, TrainJob
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.ray.cluster import Cluster
    from verl_async.report.output_folder import OutputFolder


def run_train_job(job: TrainJob, output: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
    """Run a fully-async RL job to its end and leave the trained model in the output folder.

    Raises:
        EngineError: why the job could not start or go on; everything that was started is ended.
        KeyboardInterrupt: after Ctrl-C, once everything is ended.
    """
    listener.on_status("reading the prompts")
    texts = ModelTexts.load(job.model.path, job.data.chat_template)
    prompts, mix = read_training_prompts(job, texts, listener.on_note)
    held_out = read_evaluation_prompts(job, texts, job.data.max_prompt_tokens, listener.on_note)
    counted = with_steps(job, mix.epoch)
    watchers = Watchers(listener, timeline)

    async def run(cluster: Cluster) -> None:
        async with _actors(counted, job.rollout.num_workers, listener, cluster) as actors:
            training = assemble_training(counted, texts, prompts, held_out, actors, watchers, mix)
            saver = ModelSaver(actors.trainer, actors.rollouts, texts, output, listener)
            await saver.save_after(cluster.alive_during(training.run()))
            await actors.trainer.close()

    listener.on_status("starting Ray")
    with ray_cluster(job.ray, job.trainer.num_ranks + job.rollout.num_workers, output.ray_token) as cluster:
        asyncio.run(run(cluster))


def run_sft_job(job: SftJob, output: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
    """Run a supervised job to its end; otherwise as `run_train_job`."""
    listener.on_status("reading the examples")
    texts = ModelTexts.load(job.model.path, job.data.chat_template)
    examples, mix = read_training_examples(job, texts, listener.on_note)
    held_out = read_evaluation_prompts(job, texts, job.data.max_tokens, listener.on_note)
    counted = with_steps(job, mix.epoch)
    num_rollouts = job.rollout.num_workers if job.evaluation else 0
    watchers = Watchers(listener, timeline)

    async def run(cluster: Cluster) -> None:
        async with _actors(counted, num_rollouts, listener, cluster) as actors:
            training = assemble_supervised(counted, texts, examples, held_out, actors, watchers, mix)
            saver = ModelSaver(actors.trainer, actors.rollouts, texts, output, listener)
            await saver.save_after(cluster.alive_during(training.run()))
            await actors.trainer.close()

    listener.on_status("starting Ray")
    with ray_cluster(job.ray, job.trainer.num_ranks + num_rollouts, output.ray_token) as cluster:
        asyncio.run(run(cluster))


@dataclass(frozen=True, slots=True)
class _RayActors(Actors):
    """The actors with what only Ray needs to know."""

    trainer: RayTrainer
    rollouts: list[RayRolloutClient]


@asynccontextmanager
async def _actors(
    job: TrainJob | SftJob, num_rollouts: int, listener: JobListener, cluster: Cluster
) -> AsyncIterator[_RayActors]:
    """Start trainer ranks and rollout workers; the cluster ends them."""
    num_ranks = job.trainer.num_ranks
    listener.on_status(f"starting trainer ranks ({num_ranks}) and rollout workers ({num_rollouts})")
    for_rank, for_worker = divide_resources(
        ActorNeeds("trainer.num_ranks", num_ranks, "engine.device", job.engine.device, job.engine.num_threads),
        ActorNeeds("rollout.num_workers", num_rollouts, "rollout.device", job.rollout.device, job.rollout.num_threads),
        ray.cluster_resources(),
    )
    trainer = RayTrainer(job.engine, job.model.path, job.trainer, for_rank.options(), reference_engine(job))
    if for_worker.share < 1:
        await trainer.place()
    rollouts = [
        RayRolloutClient(index, job.rollout, job.model.path, for_worker.options()) for index in range(num_rollouts)
    ]
    names = ", ".join(client.name for client in rollouts)
    await cluster.alive_during(
        asyncio.gather(
            trainer.start(),
            within(job.rollout.timeout_s, f"{names} did not all start", asyncio.gather(*(r.start() for r in rollouts))),
        )
    )
    for note in trainer.notes:
        listener.on_note(note)
    if rollouts:
        _choose_transport(job, trainer, rollouts)
    listener.on_status("training")
    yield _RayActors(trainer, rollouts)


def _choose_transport(job: TrainJob | SftJob, trainer: RayTrainer, rollouts: list[RayRolloutClient]) -> None:
    """Have weights travel through shared memory, where all are on one machine.

    Raises:
        ConfigError: ``shared_memory`` is asked for, but they are on several machines.
    """
    config = job.weight_sync
    elsewhere = [client.name for client in rollouts if client.node_id != trainer.node_id]
    if config.transport == "object_store" or (config.transport == "auto" and elsewhere):
        return
    if elsewhere:
        raise ConfigError(
            f"weight_sync.transport=shared_memory needs all rollout workers on the machine of trainer rank 0, but "
            f"{', '.join(elsewhere)} are elsewhere; use auto or object_store"
        )
    trainer.shares_memory = True
