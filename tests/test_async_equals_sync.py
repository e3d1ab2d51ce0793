"""Staleness 0 with a sync after every step IS synchronous training: the same weights, bit for bit."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from examples.addition_data import prompt_row, save_model
from tests.end_to_end import run
from verl_async.algorithms.algorithm import Algorithm
from verl_async.data.rewards import Sample, load_reward, read_result
from verl_async.data.tokenization import decode_response
from verl_async.job import load_train_job
from verl_async.orchestrator.batches import BatchPlan, build_sequences, with_advantages
from verl_async.orchestrator.inputs import ModelTexts, read_training_prompts
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.samples import ScoredGroup
from verl_async.orchestrator.workflow import Trajectory
from verl_async.reward_config import RewardFunctionConfig
from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate, send_weights
from verl_async.rollout.interface import GenerationRequest
from verl_engine.engine.worker import EngineWorker

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster
    from verl_engine.testing.rank_pools import OnRanks

RECIPE = """
model: {path: MODEL}
engine: {backend: fsdp2, learning_rate: 1.0e-3, device: cpu}
data: {prompts: PROMPTS, seed: 3}
reward: {function: plus_signs.score}
rollout: {n: 4, max_response_tokens: 5, max_batch_prompts: 3, device: cpu, deterministic: true}
async_training: {staleness_threshold: 0, trigger_parameter_sync_step: 1, require_batches: 2}
trainer: {num_steps: 3, mini_batch_size: 4, max_tokens_per_micro_batch: 100}
"""
REWARD = """
import asyncio
import random


def score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("+") + 0.1 * len(solution_str)


async def score_in_any_order(**sample):
    await asyncio.sleep(random.random() / 5)
    return score(**sample)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A job on a tiny untrained model whose reward it can earn at once."""
    save_model(tmp_path / "model", seed=0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt_row(a, 97 - a)) + "\n" for a in range(10, 20)), encoding="utf-8")
    (tmp_path / "plus_signs.py").write_text(REWARD, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "model")).replace("PROMPTS", str(prompts)), encoding="utf-8")
    return path


def train_in_a_plain_loop(rank: int, recipe: Path, folder: Path, num_ranks: int) -> None:
    """Generate, score, train, copy the weights; one after the other, no queue and no other process."""
    sys.path.append(str(recipe.parent))
    job = load_train_job(recipe, [])
    texts = ModelTexts.load(job.model.path)
    prompts, _ = read_training_prompts(job, texts, print)
    source = PromptSource(prompts, job.data.seed, job.data.shuffle)
    reward = load_reward(RewardFunctionConfig(function="plus_signs.score"))
    assert isinstance(job.rollout, EmbeddedConfig)
    rollout = EmbeddedEngine(job.rollout, job.model.path)
    worker = EngineWorker(job.engine, job.model.path, rank, num_ranks)
    worker.create()
    algorithm = Algorithm.load(job.algorithm)
    number = 0
    for step in range(job.trainer.steps):
        groups: list[ScoredGroup] = []
        for size in (3, 3, 2):  # eight prompts, at most three at a time
            draws = [source.draw(number + index) for index in range(size)]
            number += size
            sampling = texts.sampling(job.rollout)
            requests = [
                GenerationRequest(draw.encoded.token_ids, sampling, (draw.seed(job.data.seed, place),))
                for draw in draws
                for place in range(4)
            ]
            answers = generate(rollout, requests, sealed=True)
            for index, draw in enumerate(draws):
                own = answers[4 * index : 4 * index + 4]
                texts_of_own = [decode_response(texts.tokenizer, answer.token_ids) for answer in own]
                samples = [Sample(draw.encoded.prompt, text, "") for text in texts_of_own]
                rewards = [read_result(reward(**sample.arguments)).score for sample in samples]
                groups.append(ScoredGroup(draw, tuple(Trajectory((one,)) for one in own), tuple(rewards), (False,) * 4))
        for start in (0, 4):
            part = groups[start : start + 4]
            sequences = with_advantages(part, build_sequences(part, (), "rollout"), algorithm)
            plan = BatchPlan.of(sequences, num_ranks, job.trainer.max_tokens_per_micro_batch)
            worker.train_batch(plan.pick(sequences)[rank], algorithm.loss, job.rollout.temperature)
        names = [spec.name for spec in worker.engine.weight_specs()]
        send_weights(rollout, worker.engine.full_weights(names), step + 1)
    worker.save_pretrained(folder)


def load(folder: Path) -> dict[str, Any]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "reward"),
    [
        pytest.param(1, 1, "score", marks=pytest.mark.nightly),
        (2, 2, "score_in_any_order"),
        pytest.param(1, 2, "score_in_any_order", marks=pytest.mark.nightly),
        pytest.param(2, 1, "score_in_any_order", marks=pytest.mark.nightly),
    ],
)
def test_staleness_zero_equals_a_plain_synchronous_loop(
    recipe: Path, tmp_path: Path, on_ranks: OnRanks, cluster: Cluster, num_ranks: int, num_workers: int, reward: str
) -> None:
    on_ranks(train_in_a_plain_loop, recipe, tmp_path / "sync", num_ranks, world_size=num_ranks)
    settings = (
        f"trainer.num_ranks={num_ranks}",
        f"rollout.num_workers={num_workers}",
        f"reward.function=plus_signs.{reward}",
    )
    run("train", recipe, tmp_path / "async", *settings, cluster=cluster)
    before, expected, found = load(tmp_path / "model"), load(tmp_path / "sync"), load(tmp_path / "async" / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not any(torch.equal(before[name], found[name]) for name in found), "nothing was trained"
