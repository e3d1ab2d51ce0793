"""A job's rewards in processes: many samples at once, and a call that hangs costs its own process only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from verl_async.data.reward_process import CallFailed, ProcessLost, RewardProcess
from verl_async.data.rewards import LARGEST, Result, exact_match
from verl_async.errors import RewardError
from verl_async.reward_config import EXACT_MATCH
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verl_async.data.rewards import Sample
    from verl_async.reward_config import RewardConfig, RewardFunctionConfig


@dataclass(frozen=True, slots=True)
class Score:
    """What came of scoring one sample."""

    reward: float | None
    """None where a function failed and ``reward.on_error`` is ``drop``."""
    is_exact: bool
    """Whether the response is the ground truth."""
    metrics: Mapping[str, float]
    """Other numbers that the functions returned; of several functions after their names, with each one's ``score``."""
    errors: tuple[str, ...] = ()
    """What failed, with the sample's id."""


class RewardPool:
    """Scores samples; open it with ``async with``, in the event loop that uses it.

    async with RewardPool(config) as pool:
        score = await pool.score(Sample(prompt, "42", "0-3"))
    """

    def __init__(self, config: RewardConfig) -> None:
        """Take the validated ``reward`` section."""
        self._config = config
        self._functions = [_FunctionPool(one, at, config) for at, one in config.all_functions]

    async def __aenter__(self) -> Self:
        """Start one process for each function.

        Raises:
            ConfigError: a function cannot be imported, is none, or takes other arguments or settings.
        """
        try:
            for function in self._functions:
                await function.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all processes, with the calls that they still have."""
        for function in self._functions:
            await function.close()

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Check that each data source has a reward, and each reward that names some is used.

        Raises:
            ConfigError: one has none.
        """
        for data_source in data_sources:
            if not any(function.config.scores(data_source) for function in self._functions):
                raise ConfigError(
                    f"reward.functions: none scores prompts of data_source {data_source!r}; add it to the data_sources "
                    "of one, or leave data_sources out where a function scores all"
                )

    async def score(self, sample: Sample) -> Score:
        """Score one sample, with all functions for its data source at once.

        Raises:
            RewardError: a function failed, and ``reward.on_error`` is ``stop``.
            ConfigError: no function scores its data source; or a process that was replaced cannot start again.
        """
        self.check_sources([sample.prompt.data_source])
        functions = [one for one in self._functions if one.config.scores(sample.prompt.data_source)]
        if len(functions) == 1 and functions[0].config.function == EXACT_MATCH:  # nothing to wait for
            found: list[Result | BaseException] = [await functions[0].score(sample)]
        else:
            found = await asyncio.gather(*(one.score(sample) for one in functions), return_exceptions=True)
        total, metrics, errors = 0.0, dict[str, float](), list[str]()
        for function, result in zip(functions, found, strict=True):
            if isinstance(result, RewardError) and self._config.on_error != "stop":
                errors.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                total += function.config.weight * result.score
                metrics |= self._named(function.config.label, result)
        if not abs(total) <= LARGEST:
            raise RewardError(
                f"reward.functions: sample {sample.sample_id}: the weighted sum {total} is beyond float32"
            )
        dropped = errors and self._config.on_error == "drop"
        return Score(None if dropped else total, sample.is_exact, metrics, tuple(errors))

    def _named(self, label: str, result: Result) -> dict[str, float]:
        if len(self._functions) == 1:
            return dict(result.metrics)
        return {f"{label}/{key}": value for key, value in {**result.metrics, "score": result.score}.items()}


class _FunctionPool:
    """The processes of one function."""

    def __init__(self, config: RewardFunctionConfig, at: str, limits: RewardConfig) -> None:
        self.config = config
        self._at = at
        self._max_async_calls = limits.max_async_calls
        self._slots = [_Slot(config, at, limits.timeout_s) for _ in range(limits.num_processes)]
        # The last one left is taken first, so that a further process starts only when all others are busy.
        self._seats: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()

    async def start(self) -> None:
        if self.config.function == EXACT_MATCH:
            return
        process = await self._slots[0].started()
        num_seats = self._max_async_calls if process.is_async else 1
        for slot in self._slots[::-1] * num_seats:
            self._seats.put_nowait(slot)

    async def close(self) -> None:
        for slot in self._slots:
            await slot.close()

    async def score(self, sample: Sample) -> Result:
        """Score one sample.

        Raises:
            RewardError: the call failed; names function, file and sample.
        """
        if self.config.function == EXACT_MATCH:
            return Result(exact_match(**sample.arguments), {})
        slot = await self._seats.get()
        try:
            return await slot.score(sample)
        except CallFailed as error:
            where = f"{self._at}.function={self.config.function} ({slot.file})"
            what = f"sample {sample.sample_id} (prompt {sample.prompt.row}) {error}"
            raise RewardError(f"{where}: {what}") from error.__cause__
        finally:
            self._seats.put_nowait(slot)


class _Slot:
    """One process, started when it is needed and replaced when it has ended."""

    def __init__(self, config: RewardFunctionConfig, at: str, timeout_s: float) -> None:
        self._new = partial(RewardProcess, config, at, timeout_s)
        self._process: RewardProcess | None = None
        self._entering = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_calls = 0

    @property
    def file(self) -> str:
        """Of the function."""
        return self._process.file if self._process else ""

    async def started(self) -> RewardProcess:
        if self._process is None or not self._process.is_usable:
            await self.close()
            process = self._new()
            await process.start()
            self._process = process
        return self._process

    async def score(self, sample: Sample) -> Result:
        """Score one sample; again, and alone, where the process was lost and other calls may be at fault."""
        async with self._entering:
            process = await self.started()
            self._num_calls += 1
            self._idle.clear()
        try:
            return await process.score(sample)
        except ProcessLost as lost:
            if not lost.num_beside:
                raise
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()
        async with self._entering:
            await self._idle.wait()
            return await (await self.started()).score(sample)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()
            self._process = None
