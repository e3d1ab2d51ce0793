"""Fixtures of the tests that cross packages."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end import Cluster, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Write the addition task, very small: few sums, few steps, an untrained model."""
    from examples import addition_data  # imports torch when it makes the model, as few tests need

    folder = tmp_path_factory.mktemp("task")
    addition_data.save_model(folder / "model", seed=0)
    sums = [(number, 3 * number) for number in range(24)]
    _write_lines(folder / "prompts.jsonl", [addition_data.prompt_row(a, b) for a, b in sums[:16]])
    _write_lines(folder / "held_out.jsonl", [addition_data.prompt_row(a, b) for a, b in sums[16:]])
    _write_lines(folder / "examples.jsonl", [addition_data.example_row(a, b) for a, b in sums[:16]])
    shared: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "engine": {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu"},
        "rollout": {"n": 4, "max_response_tokens": 8, "max_batch_prompts": 4, "device": "cpu"},
        "reward": {"function": "tests.end_to_end_rewards.count_even"},
    }
    train = {
        **shared,
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "trainer": {"num_steps": 3, "mini_batch_size": 4},
    }
    sft = {
        **shared,
        "data": {"examples": str(folder / "examples.jsonl")},
        "trainer": {"num_steps": 3, "batch_size": 8},
    }
    for name, recipe in (("train", train), ("sft", sft)):  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return Task(folder / "model", folder / "train.yaml", folder / "sft.yaml")


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Cluster]]:
    """Give a function that returns a Ray cluster: the same one for as long as it lives."""
    with ExitStack() as stack:
        started: list[Cluster] = []

        def living() -> Cluster:
            if not started or not started[-1].is_alive:
                started.append(stack.enter_context(Cluster.start(tmp_path_factory.mktemp("cluster"))))
            return started[-1]

        yield living


@pytest.fixture
def cluster(clusters: Callable[[], Cluster]) -> Cluster:
    """A Ray cluster for jobs that end by themselves: starting one takes longer than most of them."""
    return clusters()


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
