"""What lies between prompts and trainer, with 2,000 requests in flight over Ray: pauses, and what CPU it costs.

Dispatcher, workflow, Ray, scoring and queue are the job's own, the data those of `examples/addition_grpo.yaml`; the
rollout engine sleeps. CPU time is that of all threads of the driver and of the worker, less the engine's own thread.
Last line: JSON.

    pause_tokens      tokens that samples still began after a pause was called, the worst of 20; 1 is the way there
    pause_answer      the longest time until it was answered, in tokens
    dispatch_us       CPU microseconds of the dispatch path for a sample
    generate_us       CPU microseconds in which the embedded engine generates one, with the recipe's model and batch
    cpu_share         the one over the other; *_48 with responses of 48 tokens in place of the recipe's 4
    within_bounds     whether pause_tokens <= 1 and cpu_share <= 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
from sleeping_engine import SleepingConfig, SleepingEngine, installed, make_task

from verl_async.config import RayConfig, RolloutConfig
from verl_async.data.prompts import read_prompts
from verl_async.orchestrator.dispatcher import Dispatcher
from verl_async.orchestrator.inputs import ModelTexts
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.staleness import StalenessBudget
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import beside
from verl_async.orchestrator.workflow import load_workflow
from verl_async.ray.cluster import ray_cluster
from verl_async.ray.rollout import RayRolloutClient
from verl_async.reward_config import RewardConfig
from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from verl_async.orchestrator.samples import EncodedPrompt

N, IN_FLIGHT, BATCH = 8, 2000, 512
"""Samples of a prompt; at the worker; at once in the demo."""
RECIPE, LONG = 4, 48
"""Tokens of a response."""
PAUSES = 20
MOST_BEGUN, MOST_SHARE = 1, 0.05
_TIMEOUT_S = 60.0


T = TypeVar("T")


class Load:
    """The dispatch path with one worker, and somebody who empties the queue."""

    def __init__(
        self, texts: ModelTexts, prompts: list[EncodedPrompt], config: SleepingConfig, num_prompts: int
    ) -> None:
        timeline = Timeline()
        self.client = RayRolloutClient(0, config, texts.folder, {"num_cpus": 1})
        self.worker = RolloutWorker(self.client, timeline, _TIMEOUT_S)
        self.queue = SampleQueue(num_prompts)
        self.scorer = texts.scorer(RewardConfig(), prompts, print, timeline)
        self.num_prompts = num_prompts
        self.config = config
        budget = StalenessBudget(num_prompts, num_prompts)
        budget.synced()
        self.dispatcher = Dispatcher(
            workers=[self.worker],
            source=PromptSource(prompts, seed=0, shuffle=True),
            budget=budget,
            queue=self.queue,
            sampler=Sampler(load_workflow(config).made, self.scorer, texts.sampling(config), seed=0),
            config=config,
            put_timeout_s=_TIMEOUT_S,
        )

    async def run(self, main: Callable[[Load], Coroutine[Any, Any, T]]) -> T:
        """Do something while requests are in flight."""
        await self.client.start()
        async with self.scorer.pool:
            found = await beside(main(self), self.dispatcher.run(), self.worker.serve())
        await self.client.close()
        ray.kill(self.client.actor)  # the next needs its CPU
        return found

    async def at_engine(self, function: Callable[[SleepingEngine], Any]) -> Any:
        """Ask something of the engine in its process."""
        return await self.client.actor.__ray_call__.remote(lambda actor: function(actor._engine))  # noqa: SLF001

    async def fill(self) -> None:
        """Wait until all that may be are in flight: whole groups."""
        while (await self.client.stats()).running <= IN_FLIGHT - N:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.05)


async def pauses(load: Load) -> dict[str, float]:
    """Pause in mid-generation, again and again."""
    token_s = load.config.token_s
    answers, begun = [], []
    for number in range(PAUSES):
        await load.fill()
        await asyncio.sleep(token_s * number / PAUSES)
        called_s = time.monotonic()
        await load.worker.pause("abort")
        answers.append((time.monotonic() - called_s) / token_s)
        starts = await load.at_engine(lambda engine: list(engine.turn_starts))
        begun.append(sum(one > called_s for one in starts))
        await load.worker.resume()
    return {"pause_tokens": max(begun), "pause_answer": max(answers)}


async def cpu_us(load: Load) -> float:
    """CPU time of the dispatch path for a sample, in the second half of a run."""

    async def now_s() -> float:
        theirs_s: float = await load.at_engine(lambda engine: time.process_time() - engine.cpu_s)
        return theirs_s + time.process_time()

    half = load.num_prompts // 2
    await load.queue.take(load.num_prompts - half, _TIMEOUT_S)
    start_s = await now_s()
    await load.queue.take(half, _TIMEOUT_S)
    return (await now_s() - start_s) / (half * N) * 1e6


def generate_us(texts: ModelTexts, prompts: list[EncodedPrompt], num_tokens: int) -> float:
    """CPU time of the embedded engine for a sample, the median of five batches as the dispatcher sends them."""
    sampling = replace(texts.sampling(RolloutConfig(max_response_tokens=num_tokens)), stop_token_ids=())
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), texts.folder)
    requests = [GenerationRequest(prompts[place // N].token_ids, sampling, (place,)) for place in range(BATCH)]
    seconds = []
    for _ in range(6):
        start_s = time.process_time()
        generate(engine, requests)
        seconds.append(time.process_time() - start_s)
    engine.close()
    return sorted(seconds[1:])[2] / BATCH * 1e6


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="of each load (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    with installed() as folder:
        make_task(folder)
        texts = ModelTexts.load(folder / "model")
        prompts = [texts.encode(one, 16, "prompts") for one in read_prompts(folder / "train.parquet", "prompts")]
        for tokens in (RECIPE, LONG):
            (folder / f"{tokens}").write_text(f"{tokens}\n", encoding="ascii")

        def load(tokens: int, token_s: float, num_prompts: int) -> Load:
            config = SleepingConfig(
                backend="sleeping",
                device="cpu",
                n=N,
                max_batch_prompts=IN_FLIGHT // N,
                max_response_tokens=tokens,
                token_s=token_s,
                slots=IN_FLIGHT,
                lengths=folder / f"{tokens}",
            )
            return Load(texts, prompts, config, num_prompts)

        with ray_cluster(RayConfig(), 1, folder / "token"):
            metrics |= asyncio.run(load(LONG, 0.1, 10 * options.prompts).run(pauses))
            for tokens, token_s, suffix in ((RECIPE, 0.5, ""), (LONG, 0.05, "_48")):
                metrics["dispatch_us" + suffix] = asyncio.run(load(tokens, token_s, options.prompts).run(cpu_us))
                metrics["generate_us" + suffix] = generate_us(texts, prompts, tokens)
                metrics["cpu_share" + suffix] = metrics["dispatch_us" + suffix] / metrics["generate_us" + suffix]
    is_good = metrics["pause_tokens"] <= MOST_BEGUN and metrics["cpu_share"] <= MOST_SHARE
    metrics["within_bounds"] = float(is_good)
    print(json.dumps({name: round(value, 3) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
