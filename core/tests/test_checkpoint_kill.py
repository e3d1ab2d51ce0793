"""kill -9 during a checkpoint, at any moment: the one before always loads, and the run goes on as if nothing was."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import pytest
import torch

from core.tests.test_module_engine import PlainEngine, make, set_gradients, weights
from verl_engine.engine.checkpoints.folders import is_whole, step_folder
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.testing.rank_pool import PRELOADED

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext
    from pathlib import Path

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NUM_STEPS: Final = 30
SYSTEM_CALLS: Final = ("fsync", "rename", "rmdir", "unlink", "mkdir")
"""Whatever changes what is on the disk for good goes through one of these."""


def train_step(engine: PlainEngine, step: int) -> None:
    """One step whose gradient depends on random numbers: they must come back too."""
    set_gradients(engine, float(torch.rand(())) + step)
    engine.optimizer_step()


def train(root: str, num_steps: int, slow_down: bool) -> None:
    """Resume, train to the end, save after each step; in a process of its own."""
    from pathlib import Path

    store = CheckpointStore(Path(root), keep_last=2)
    engine = make(warmup_steps=5)
    torch.manual_seed(0)
    begin = 0 if store.latest() is None else store.load(engine).step
    fsync = os.fsync

    def slow_fsync(handle: int) -> None:
        time.sleep(0.01)  # as on a busy disk: most of the time a checkpoint is being written
        fsync(handle)

    with mock.patch("os.fsync", slow_fsync if slow_down else fsync):
        for step in range(begin + 1, num_steps + 1):
            train_step(engine, step)
            store.save(engine, step, {"step": step})
        store.close()


def train_until_call(root: str, call: int) -> None:
    """Make two steps more, and die at the given system call of the second save."""
    from pathlib import Path

    store = CheckpointStore(Path(root), keep_last=1)
    engine = make(warmup_steps=5)
    store.load(engine)
    train_step(engine, 2)
    calls = 0

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return deadly

    with ExitStack() as patches:
        for name in SYSTEM_CALLS:
            patches.enter_context(mock.patch(f"os.{name}", counted(name)))
        store.save(engine, 2, wait=True)
    store.close()


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def uninterrupted(num_steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Weights after each step of a run that nobody disturbs."""
    engine = make(warmup_steps=5)
    torch.manual_seed(0)
    found = {}
    for step in range(1, num_steps + 1):
        train_step(engine, step)
        found[step] = weights(engine)
    return found


def require_right(store: CheckpointStore, expected: dict[int, dict[str, torch.Tensor]]) -> None:
    """Whatever is listed is whole, loads, and holds the weights of its step."""
    for step in store.steps():
        assert is_whole(step_folder(store.root, step))
        info = store.load(engine := make(warmup_steps=5), step)
        assert info.user_state in ({"step": step}, {})
        assert all(torch.equal(tensor, expected[step][name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_killed_at_drawn_moments_the_one_before_loads_and_the_run_ends_bit_equal(
    tmp_path: Path, context: ForkServerContext, num_kills: int
) -> None:
    seed = secrets.randbits(32)
    print(f"seed of the moments: {seed}")  # noqa: T201 - pytest shows it where the test fails
    moments = random.Random(seed)
    expected = uninterrupted(NUM_STEPS)
    store = CheckpointStore(tmp_path / "root")
    latest = 0
    for _ in range(num_kills):
        process = context.Process(target=train, args=(str(store.root), NUM_STEPS, True))
        process.start()
        while process.is_alive() and (store.latest() or 0) <= latest and latest < NUM_STEPS - 1:
            time.sleep(0.002)  # each run gets somewhere, then dies soon
        time.sleep(moments.uniform(0.0, 0.1))
        process.kill()
        process.join()
        assert (store.latest() or 0) >= latest
        latest = store.latest() or 0
        require_right(store, expected)
    process = context.Process(target=train, args=(str(store.root), NUM_STEPS, False))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert store.steps() == [NUM_STEPS - 1, NUM_STEPS]
    require_right(store, expected)
    assert sorted(path.name for path in store.root.iterdir()) == [f"step-{step:08d}" for step in store.steps()]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_killed_before_any_of_its_system_calls_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, context: ForkServerContext, every: int
) -> None:
    expected = uninterrupted(2)
    call = 0
    exit_code: int | None = -signal.SIGKILL
    seen = set()
    while exit_code == -signal.SIGKILL:
        call += every
        store = CheckpointStore(tmp_path / f"call-{call}")
        engine = make(warmup_steps=5)
        torch.manual_seed(0)
        train_step(engine, 1)
        store.save(engine, 1, wait=True)
        process = context.Process(target=train_until_call, args=(str(store.root), call))
        process.start()
        process.join()
        exit_code = process.exitcode
        assert store.steps() in ([1], [1, 2], [2])
        seen.add(tuple(store.steps()))
        require_right(store, expected)
    assert exit_code == 0
    assert seen == {(1,), (1, 2), (2,)} or every > 1
    assert call > 10
