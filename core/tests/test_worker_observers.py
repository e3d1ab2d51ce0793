"""Observers named in the config are active on a worker, and their metrics are in each step's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from core.tests.fake_distributions import write_distribution
from verl_engine import EngineConfig, EngineWorker, Sequence
from verl_engine.contract.names import BACKENDS_GROUP, OBSERVERS_GROUP

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput

HOOKS = """
from core.tests.fake_engine import SPEC, FakeEngine
from verl_engine import OptimizerStep, hookimpl
from contextlib import nullcontext

@hookimpl
def engine_create(config, model_folder, role):
    return FakeEngine()

@hookimpl
def engine_gradient_sync(engine, is_last_micro_batch):
    return nullcontext()

@hookimpl
def engine_optimizer_step(engine):
    engine.zero_grad()
    return OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)
"""
COUNTING = """
from verl_engine import hookimpl
calls = 0

@hookimpl(wrapper=True)
def engine_gradient_sync(is_last_micro_batch):
    global calls
    calls += 1
    return (yield)

def metrics():
    return {"calls": calls}
"""


def loss_fn(output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -output.log_probs[batch.loss_mask].sum()
    return loss, {"nll": loss.detach()}


@pytest.fixture
def worker(site: Path) -> EngineWorker:
    write_distribution(site, "toy-engine", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": HOOKS})
    write_distribution(
        site, "toy-observer", {OBSERVERS_GROUP: {"counting": "obs_counting"}}, modules={"obs_counting": COUNTING}
    )
    config = EngineConfig(backend="toy", learning_rate=0.1, observers=("counting", "timing"))
    return EngineWorker(config, site)


def test_metrics_of_observers_are_in_the_report_under_the_same_names_each_step(worker: EngineWorker) -> None:
    worker.create()
    sequence = Sequence(np.array([1, 2, 3]), np.array([False, True, True]), {})
    reports = [worker.train_batch([[sequence]] * 3, loss_fn) for _ in range(2)]
    names = ["engine_prepare_process", "engine_create", "engine_gradient_sync", "forward_backward"]
    expected = {"nll", "counting/calls", *(f"timing/{name}_s" for name in [*names, "engine_optimizer_step"])}
    assert [set(report.metrics) for report in reports] == [expected, expected]
    assert [report.metrics["counting/calls"] for report in reports] == [3, 6]
    assert all(0 < report.metrics["timing/forward_backward_s"] < 60 for report in reports)
