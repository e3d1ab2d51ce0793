"""Who may use a rollout worker, and when."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from plugins.verl_async.tests.fakes import FakeRollout, encoded_prompts
from verl_async.orchestrator.actors import RolloutWorker
from verl_async.orchestrator.samples import Draw
from verl_async.rollout.interface import GenerationRequest, SamplingParams


def requests() -> list[GenerationRequest]:
    return Draw(0, encoded_prompts(1)[0]).requests(1, SamplingParams(1000), 0)


async def is_free(worker: RolloutWorker) -> bool:
    """Whether someone can use the worker right now, and the next one after that."""
    for _ in range(2):
        with suppress(asyncio.TimeoutError):
            async with worker.using():
                continue
        return False
    return not worker._lock.locked()


def test_users_come_in_the_order_in_which_they_asked() -> None:
    order: list[str] = []

    async def use(worker: RolloutWorker, name: str) -> None:
        async with worker.using():
            order.append(name)
            await asyncio.sleep(0.01)

    async def sync(worker: RolloutWorker) -> None:
        async with worker.paused(interrupt=False):
            order.append("sync")

    async def main() -> None:
        worker = RolloutWorker(FakeRollout())
        asked = [asyncio.ensure_future(use(worker, "first"))]
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(sync(worker)))
        await asyncio.sleep(0.001)
        asked += [asyncio.ensure_future(use(worker, name)) for name in ("second", "third")]
        await asyncio.gather(*asked)

    asyncio.run(main())
    assert order == ["first", "sync", "second", "third"]


def test_a_rollout_loop_that_comes_back_at_once_does_not_starve_a_sync() -> None:
    async def main() -> int:
        worker = RolloutWorker(FakeRollout())
        num_uses = 0

        async def use_again_and_again() -> None:
            nonlocal num_uses
            while True:
                async with worker.using():
                    num_uses += 1
                    await asyncio.sleep(0.001)

        using = asyncio.ensure_future(use_again_and_again())
        await asyncio.sleep(0.01)
        before = num_uses
        async with worker.paused(interrupt=False):
            assert num_uses - before <= 1
        using.cancel()
        return num_uses

    assert asyncio.run(main()) > 1


def test_generation_is_interrupted_or_waited_for() -> None:
    async def main(*, interrupt: bool) -> list[str]:
        client = FakeRollout(token_s=0.002, num_tokens=50)
        worker = RolloutWorker(client)
        reasons: list[str] = []

        async def generate() -> None:
            async with worker.using() as used:
                reasons.extend(result.finish_reason for result in await used.generate(requests()))

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(0.02)
        async with worker.paused(interrupt=interrupt) as used:
            assert used is client
            assert not client.generating
        await generating
        return reasons

    assert asyncio.run(main(interrupt=True)) == ["interrupted"]
    assert asyncio.run(main(interrupt=False)) == ["stop"]


class HardOfHearing(FakeRollout):
    """Does not hear the first three interrupts, like a generate that was still being sent off."""

    async def interrupt(self) -> None:
        self.num_interrupts += 1
        if self.num_interrupts > 3:
            self._interrupted.set()


def test_interrupt_is_repeated_until_it_is_heard() -> None:
    async def main() -> int:
        client = HardOfHearing(token_s=0.001, num_tokens=10_000)
        worker = RolloutWorker(client)

        async def generate() -> None:
            async with worker.using() as used:
                await used.generate([GenerationRequest((1,), SamplingParams(10_000), (0,))])

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(0.005)
        async with worker.paused(interrupt=True):
            pass
        await generating
        return client.num_interrupts

    assert asyncio.run(asyncio.wait_for(main(), 5.0)) == 4


@pytest.mark.parametrize("num_turns", range(8))
@pytest.mark.parametrize("interrupt", [True, False])
def test_cancelled_while_waiting_never_leaves_the_worker_locked(num_turns: int, interrupt: bool) -> None:
    """Cancelled after any number of turns of the event loop, also around the one in which the lock comes free."""

    async def main() -> None:
        worker = RolloutWorker(FakeRollout())
        entered = False

        async def pause() -> None:
            nonlocal entered
            async with worker.paused(interrupt=interrupt):
                entered = True
                await asyncio.sleep(100)

        holder = worker.using()
        await holder.__aenter__()
        waiting = asyncio.ensure_future(pause())
        await asyncio.sleep(0.01)
        await holder.__aexit__(None, None, None)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert await is_free(worker)

    asyncio.run(asyncio.wait_for(main(), 5.0))


def test_cancelled_while_another_holds_it() -> None:
    async def main() -> None:
        worker = RolloutWorker(FakeRollout())
        async with worker.using():
            waiting = asyncio.ensure_future(worker.paused(interrupt=True).__aenter__())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert worker._lock.locked()
        assert await is_free(worker)

    asyncio.run(asyncio.wait_for(main(), 5.0))


class Deaf(FakeRollout):
    """Fails when it is interrupted."""

    async def interrupt(self) -> None:
        raise ConnectionError("gone")


@pytest.mark.parametrize("held", [True, False])
def test_a_failing_interrupt_leaves_the_worker_free(held: bool) -> None:
    async def main() -> None:
        worker = RolloutWorker(Deaf())
        holder = worker.using()
        if held:
            await holder.__aenter__()
        with pytest.raises(ConnectionError, match="gone"):
            async with worker.paused(interrupt=True):
                pass
        if held:
            await holder.__aexit__(None, None, None)
        assert await is_free(worker)

    asyncio.run(asyncio.wait_for(main(), 5.0))


def test_an_error_inside_frees_the_worker() -> None:
    async def main() -> None:
        worker = RolloutWorker(FakeRollout(3))
        with pytest.raises(ValueError, match="inside"):
            async with worker.paused(interrupt=True):
                raise ValueError("inside")
        with pytest.raises(ValueError, match="inside"):
            async with worker.using():
                raise ValueError("inside")
        assert await is_free(worker)
        assert worker.name == "rollouter-3"

    asyncio.run(main())
