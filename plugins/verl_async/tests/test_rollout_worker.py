"""What a rollout worker was asked for, what came of it, and who is stuck."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.fake_rollout import STOP, FakeRollout
from verl_async.errors import RolloutError
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import beside
from verl_async.rollout.interface import Completion, Generation, GenerationRequest, SamplingParams
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any


def ask(number: int = 0) -> GenerationRequest:
    return GenerationRequest((10,), SamplingParams(1000), (number,))


def run(worker: RolloutWorker, main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(beside(main, worker.serve()), 30.0))


def test_an_interrupted_sample_goes_on_with_its_tokens_and_its_seed() -> None:
    client = FakeRollout(token_s=0.002, num_tokens=8)
    worker = RolloutWorker(client, Timeline(), 5.0)

    async def main() -> Generation:
        generating = asyncio.ensure_future(worker.generate(ask()))
        await asyncio.sleep(0.007)
        await worker.pause("abort")
        client.version = 1
        await worker.resume()
        return await generating

    found = run(worker, main())
    [first], [rest] = client.calls
    [before] = rest.so_far
    assert first.seeds == rest.seeds
    assert found.token_ids == [11, 12, 13, 14, 15, 16, 17, STOP]
    assert found.weight_versions == [0] * len(before.token_ids) + [1] * (8 - len(before.token_ids))
    assert 0 < len(before.token_ids) < 8


def test_requests_in_flight_have_different_ids() -> None:
    client = FakeRollout()
    worker = RolloutWorker(client, Timeline(), 5.0)

    async def main() -> None:
        await asyncio.gather(*(worker.generate(ask(number)) for number in range(5)), *worker.send([ask(), ask()]))

    run(worker, main())
    ids = [request.request_id for call in client.calls for request in call]
    assert len(set(ids)) == len(ids) == 7


def test_an_engine_that_gives_up_fails_the_sample() -> None:
    class Dying(FakeRollout):
        def submit(self, requests: Any, on_completion: Any, **_: bool) -> None:
            for request in requests:
                on_completion(Completion(request, 0, Generation(), RolloutError("out of memory")))

    worker = RolloutWorker(Dying(), Timeline(), 5.0)
    with pytest.raises(RolloutError, match="out of memory"):
        run(worker, worker.generate(ask()))


def test_what_nobody_wants_any_more_is_dropped() -> None:
    worker = RolloutWorker(FakeRollout(), Timeline(), 5.0)

    async def main() -> int:
        generating = asyncio.ensure_future(worker.generate(ask()))
        await asyncio.sleep(0)
        generating.cancel()
        return len((await worker.generate(ask())).token_ids)

    assert run(worker, main()) == 3


def test_a_worker_that_finishes_nothing_is_named() -> None:
    worker = RolloutWorker(FakeRollout(4, token_s=100), Timeline(), 0.05)

    async def main() -> None:
        await asyncio.sleep(0.12)  # idle for longer than the limit: that is no fault
        await asyncio.gather(*worker.send([ask(), ask()]))

    message = "rollouter-4 did not finish generating any of 2 samples within 0.05 s"
    with pytest.raises(StuckError, match=re.escape(message)):
        run(worker, main())


def test_slow_samples_and_a_long_pause_are_no_fault() -> None:
    client = FakeRollout(token_s=0.001)
    worker = RolloutWorker(client, Timeline(), 1.0)

    async def main() -> None:
        await worker.pause("keep")
        waiting = asyncio.ensure_future(worker.generate(ask()))
        await asyncio.sleep(1.2)
        await worker.resume()
        await waiting
        client.token_s = 0.1  # three tokens a sample, one sample after the other
        for _ in range(5):
            await worker.generate(ask())

    run(worker, main())


def test_the_timeline_tells_generating_from_waiting() -> None:
    timeline = Timeline()
    client = FakeRollout(token_s=0.01)
    worker = RolloutWorker(client, timeline, 5.0)

    async def main() -> None:
        await asyncio.sleep(0.03)
        await asyncio.gather(worker.generate(ask()), worker.generate(ask()))
        await worker.pause("wait")
        await asyncio.sleep(0.03)
        await worker.resume()

    run(worker, main())
    assert [span.what for span in timeline.spans] == ["wait for trainer", "generate", "wait for trainer"]
    assert {span.who for span in timeline.spans} == {"rollouter-0"}
    assert 0.2 < timeline.idle_ratio("rollouter") < 0.9
