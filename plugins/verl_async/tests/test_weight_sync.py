"""New weights to every worker: two slots, acknowledged by version and checksum."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.verl_async.tests.fake_rollout import FakeRollout
from plugins.verl_async.tests.fakes import FakeTrainer
from verl_async.config import WeightSyncConfig
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import end
from verl_async.orchestrator.weight_sync import WeightSync
from verl_async.rollout.interface import Acknowledgement, GenerationRequest, SamplingParams
from verl_engine.contract.errors import StuckError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_async.orchestrator.actors import BucketDelivery
    from verl_async.rollout.interface import Generation, PauseMode


def sync_of(
    trainer: FakeTrainer, rollouts: Sequence[FakeRollout], *, interrupt: bool = True, timeout_s: float = 5.0
) -> WeightSync:
    return WeightSync(
        trainer=trainer,
        workers=[RolloutWorker(rollout, Timeline(), timeout_s) for rollout in rollouts],
        config=WeightSyncConfig(timeout_s=timeout_s),
        dtype="float32",
        interrupt=interrupt,
        generation_timeout_s=timeout_s,
    )


def run(sync: WeightSync) -> None:
    """Run one sync."""
    asyncio.run(asyncio.wait_for(sync.run(), 10.0))


def test_every_worker_gets_each_version() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    sync = sync_of(FakeTrainer(), rollouts)
    assert sync.version == -1
    for version in range(3):
        run(sync)
        assert sync.version == version
        assert [rollout.version for rollout in rollouts] == [version, version]


def test_without_workers_there_is_nobody_to_wait_for() -> None:
    sync = sync_of(FakeTrainer(), [])
    run(sync)
    assert sync.version == 0


class SlowReader(FakeRollout):
    """Reads for a while, longer with each worker."""

    def __init__(self, index: int, turns: int) -> None:
        super().__init__(index)
        self.turns = turns
        self.seen: list[int] = []

    async def read(self, delivery: BucketDelivery) -> None:
        slots, slot = delivery.handle
        content = slots[slot]
        for _ in range(self.turns):
            assert slots[slot] == content
            assert zlib.crc32(str(content).encode()) == delivery.checksum, "the slot was written while it was read"
            await asyncio.sleep(0)
        self.seen.append(content)
        self.loaded.append(delivery.checksum)


class SlowWriter(FakeTrainer):
    """Spoils a slot for a while before it holds the bucket."""

    def __init__(self, num_buckets: int, turns: int) -> None:
        super().__init__(num_buckets=num_buckets)
        self.turns = turns

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        self.slots[slot] = -1
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return await super().write_weight_bucket(index, slot)


@settings(deadline=None)
@given(
    num_buckets=st.integers(1, 6),
    reading=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    writing=st.integers(0, 12),
)
def test_a_slot_is_never_written_while_it_is_read(num_buckets: int, reading: list[int], writing: int) -> None:
    """FakeRollout also checks that a worker loads one bucket at a time."""
    rollouts = [SlowReader(index, turns) for index, turns in enumerate(reading)]
    sync = sync_of(SlowWriter(num_buckets, writing), rollouts)
    run(sync)
    run(sync)
    assert all(rollout.seen == [*range(num_buckets)] * 2 for rollout in rollouts)


def test_writing_goes_on_while_workers_read() -> None:
    events: list[str] = []

    class Writer(FakeTrainer):
        async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
            events.append(f"write {index}")
            return await super().write_weight_bucket(index, slot)

    class Reader(FakeRollout):
        async def read(self, delivery: BucketDelivery) -> None:
            await asyncio.sleep(0.01)
            await super().read(delivery)
            events.append("read")

    run(sync_of(Writer(num_buckets=3), [Reader()]))
    assert events == ["write 0", "write 1", "read", "write 2", "read", "read"]


class Wrong(FakeRollout):
    """Acknowledges something else."""

    def __init__(self, index: int, version: int | None = None, checksum: int | None = None) -> None:
        super().__init__(index)
        self.wrong_version, self.wrong_checksum = version, checksum

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        [right] = (await super().commit_weights(version)).values()
        wrong = Acknowledgement(
            right.version if self.wrong_version is None else self.wrong_version,
            right.checksum if self.wrong_checksum is None else self.wrong_checksum,
        )
        return {"first": right, "second": wrong}


def test_a_wrong_checksum_is_an_error() -> None:
    sync = sync_of(FakeTrainer(), [FakeRollout(0), Wrong(1, checksum=0xBAD)])
    message = r"rollouter-1 \(second\) acknowledged version 0 with checksum 0x00000bad, but the trainer sent"
    with pytest.raises(WeightsError, match=message):
        run(sync)
    assert sync.version == -1


def test_a_wrong_version_is_an_error() -> None:
    with pytest.raises(
        WeightsError, match=r"rollouter-0 \(second\) acknowledged version 7 .* but the trainer sent version 0"
    ):
        run(sync_of(FakeTrainer(), [Wrong(0, version=7), FakeRollout(1)]))


def test_a_bucket_lost_on_the_way_is_noticed() -> None:
    class Forgetful(FakeRollout):
        async def read(self, delivery: BucketDelivery) -> None:
            if len(self.loaded) < 2:
                await super().read(delivery)

    with pytest.raises(WeightsError, match=r"rollouter-0 \(rollouter-0\) acknowledged"):
        run(sync_of(FakeTrainer(num_buckets=3), [Forgetful()]))


def test_a_worker_that_refuses_a_bucket_ends_the_sync_at_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(FakeRollout):
        async def read(self, delivery: BucketDelivery) -> None:
            raise WeightsError(f"{self.name} refuses {delivery.checksum:#x}")

    trainer = FakeTrainer(num_buckets=6)
    with pytest.raises(WeightsError, match="rollouter-1 refuses"):
        run(sync_of(trainer, [FakeRollout(0), Refusing(1), Refusing(2)]))
    assert max(trainer.slots) <= 1, "went on to write buckets nobody needs"
    assert caplog.text == ""  # the other failures were not left unseen


class Stuck(FakeRollout):
    """Does not come back from one kind of call."""

    def __init__(self, index: int, where: str) -> None:
        super().__init__(index)
        self.where = where

    async def read(self, delivery: BucketDelivery) -> None:
        await asyncio.sleep(100 if self.where == "read" else 0)
        await super().read(delivery)

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        await asyncio.sleep(100 if self.where == "commit" else 0)
        return await super().commit_weights(version)

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.sleep(100 if self.where == "pause" else 0)
        await super().pause(mode)

    async def resume(self) -> None:
        await asyncio.sleep(100 if self.where == "resume" else 0)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("read", r"rollouter-1 did not take weight bucket 1 of 3 within 0\.3 s"),
        ("commit", r"rollouter-1 did not acknowledge weights version 0 within 0\.3 s"),
        ("pause", r"rollouter-1 did not stop generating for a weight sync within 0\.3 s"),
        ("resume", r"rollouter-1 did not go on after a weight sync within 0\.3 s"),
    ],
)
def test_a_worker_that_does_not_answer_is_named(where: str, message: str) -> None:
    with pytest.raises(StuckError, match=message):
        run(sync_of(FakeTrainer(), [FakeRollout(0), Stuck(1, where)], timeout_s=0.3))


@pytest.mark.parametrize("method", ["plan_weight_buckets", "write_weight_bucket"])
def test_a_trainer_that_does_not_answer_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(100)

    trainer = FakeTrainer()
    monkeypatch.setattr(trainer, method, never)
    with pytest.raises(
        StuckError, match=r"the trainer did not (plan the weight buckets|write weight bucket 1 of 3) within"
    ):
        run(sync_of(trainer, [FakeRollout()], timeout_s=0.05))


def test_the_limit_is_for_the_whole_transfer() -> None:
    class Slow(FakeTrainer):
        async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
            await asyncio.sleep(0.3)
            return await super().write_weight_bucket(index, slot)

    with pytest.raises(StuckError, match=r"the trainer did not write weight bucket 2 of 9 within 0\.5 s"):
        run(sync_of(Slow(num_buckets=9), [FakeRollout()], timeout_s=0.5))


@pytest.mark.parametrize(("interrupt", "mode"), [(True, "abort"), (False, "wait")])
def test_generation_stops_or_is_waited_for_and_goes_on_under_the_new_weights(interrupt: bool, mode: str) -> None:
    async def main() -> Generation:
        rollout = FakeRollout(token_s=0.002, num_tokens=12)
        sync = sync_of(FakeTrainer(), [rollout], interrupt=interrupt)
        await sync.run()
        [worker] = sync.workers
        generating = asyncio.ensure_future(worker.generate(GenerationRequest((10,), SamplingParams(12), (0,))))
        await asyncio.sleep(0.008)
        await sync.run()
        assert rollout.pauses == [mode, mode]
        return await generating

    versions = asyncio.run(asyncio.wait_for(main(), 5.0)).weight_versions
    assert (set(versions), len(versions)) == ({0, 1} if interrupt else {0}, 12)


@pytest.mark.parametrize("interrupt", [True, False])
def test_who_does_not_stop_is_named(interrupt: bool) -> None:
    class Unstoppable(FakeRollout):
        async def pause(self, mode: PauseMode) -> None:
            assert mode == ("abort" if interrupt else "wait")
            await super().pause("wait")

    async def main() -> None:
        rollouts = [FakeRollout(0), Unstoppable(1, token_s=0.005, num_tokens=10_000)]
        sync = sync_of(FakeTrainer(), rollouts, interrupt=interrupt, timeout_s=0.05)
        [sent] = sync.workers[1].send([GenerationRequest((10,), SamplingParams(10_000), (0,))])
        await asyncio.sleep(0.01)
        limit = "0.05" if interrupt else "0.1"  # without interrupting it may take as long as a response may
        with pytest.raises(StuckError, match=f"rollouter-1 did not stop generating for a weight sync within {limit} s"):
            await sync.run()
        assert not sent.done()
        await end(*rollouts[1].tasks)

    asyncio.run(asyncio.wait_for(main(), 5.0))


@pytest.mark.parametrize("num_turns", range(0, 27, 2))
def test_a_cancelled_sync_leaves_nothing_running(num_turns: int) -> None:
    async def main() -> None:
        sync = sync_of(FakeTrainer(), [FakeRollout(0), FakeRollout(1)])
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(sync.run())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert not task.done(), "choose fewer turns"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(main(), 5.0))


def test_acknowledgements_are_equal_in_both_parts_only() -> None:
    one = Acknowledgement(1, 2)
    assert one == Acknowledgement(1, 2)
    assert one not in (replace(one, version=2), replace(one, checksum=1))
