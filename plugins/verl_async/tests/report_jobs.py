"""Small jobs and runs for the tests of the report layer."""

from __future__ import annotations

from pathlib import Path

from verl_async.config import (
    ModelConfig,
    RolloutConfig,
    SftJob,
    SftTrainerConfig,
    TrainerConfig,
    TrainJob,
)
from verl_async.data_config import DataConfig, SftDataConfig
from verl_async.evaluation_config import EvaluationConfig, EvaluationSetConfig
from verl_async.orchestrator.timeline import Span
from verl_async.report.record import RunRecord
from verl_engine.contract.engine_config import EngineConfig


def train_job(num_steps: int = 4) -> TrainJob:
    """An RL job of 2 prompts times 3 samples a step."""
    return TrainJob(
        model=ModelConfig(path=Path("some/model")),
        engine=EngineConfig(backend="fsdp2", learning_rate=2e-4),
        data=DataConfig(prompts=Path("prompts.jsonl")),
        rollout=RolloutConfig(n=3),
        trainer=TrainerConfig(num_steps=num_steps, mini_batch_size=2),
        evaluation=EvaluationConfig(sets={"sums": EvaluationSetConfig(prompts=Path("held_out.jsonl"))}),
    )


def sft_job(num_steps: int = 4) -> SftJob:
    """A supervised job of 5 examples a step."""
    return SftJob(
        model=ModelConfig(path=Path("some/model")),
        engine=EngineConfig(backend="fsdp2", learning_rate=2e-4),
        data=SftDataConfig(examples=Path("examples.jsonl")),
        trainer=SftTrainerConfig(num_steps=num_steps, batch_size=5),
    )


def sft_metrics(step: int) -> dict[str, float]:
    """What an SFT step reports."""
    return {"loss": 2.0 / step, "grad_norm": 1.0, "learning_rate": 2e-4, "step_applied": 1.0, "tokens_per_s": 1000.0}


def train_metrics(step: int) -> dict[str, float]:
    """What an RL step reports: reward 0.01, 0.02, …, and two stale samples more each step."""
    return sft_metrics(step) | {
        "reward": step / 100,
        "exact_match": step / 200,
        "response_tokens": 6.0,
        "truncated_ratio": 0.0,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "weight_version": float(step),
        "trainer/idle_ratio": 0.25,
        "rollouter/idle_ratio": 0.5,
        "clip_fraction": 0.01,
        "fully_async/count/stale_samples_processed": 2.0 * step,
    }


def evaluated(exact_match: float, reward: float) -> dict[str, float]:
    """What an evaluation on two sets reports."""
    metrics = {"sums/exact_match": exact_match, "sums/reward": reward, "sums/mean@4": exact_match}
    metrics |= {"sums/pass@2": 0.5, "sums/pass@4": 1.0, "chess/exact_match": 0.125}
    return metrics | {"seconds": 3.0, "wait_s": 0.75}


def train_record(num_steps: int, *, evaluations: bool = True) -> RunRecord:
    """A run of so many RL steps; evaluated 0.25 at the start and 0.75 at the end."""
    record = RunRecord()
    if evaluations:
        record.on_evaluation(0, evaluated(0.25, 0.3))
    for step in range(1, num_steps + 1):
        record.on_step(step, num_steps, train_metrics(step))
    if evaluations and num_steps:
        record.on_evaluation(num_steps, evaluated(0.75, 0.8))
    return record


def sft_record(num_steps: int) -> RunRecord:
    """A run of so many SFT steps."""
    record = RunRecord()
    for step in range(1, num_steps + 1):
        record.on_step(step, num_steps, sft_metrics(step))
    return record


def lockstep_spans(num_steps: int, step_s: float = 1.0) -> list[Span]:
    """A rollouter and a trainer in turn: each is busy for half of a step and waits for the other half."""
    spans: list[Span] = []
    for step in range(num_steps):
        start_s, middle_s, end_s = step * step_s, (step + 0.5) * step_s, (step + 1) * step_s
        spans += [
            Span("rollouter-0", "generate", start_s, middle_s),
            Span("trainer", "wait for samples", start_s, middle_s),
            Span("rollouter-0", "wait for trainer", middle_s, end_s),
            Span("trainer", "train", middle_s, end_s),
        ]
    return spans
