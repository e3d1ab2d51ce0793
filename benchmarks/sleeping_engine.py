"""A rollout engine that sleeps instead of computing, for the benchmarks of what is around one: `backend: sleeping`.

All samples in its slots get a token each `token_s` seconds; who comes or leaves does so between two tokens, and so does
a pause. How long a sample gets is in a file, at the place that its seed says: equal draws are equal work.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from verl_async.config import RolloutConfig
from verl_async.errors import RolloutError
from verl_async.rollout.interface import Acknowledgement, Completion, Generation, RolloutEngine, RolloutStats
from verl_async.rollout.kind import ROLLOUT
from verl_async.rollout.spec import FEATURES, RolloutSpec
from verl_engine.contract.strict_model import StrictModel
from verl_engine.engine.weights.bucket import combine_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from verl_async.rollout.interface import FinishReason, GenerationRequest, PauseMode, WeightTransport
    from verl_engine.engine.weights.bucket import WeightBucket

TOKEN: Final = 4
"""The token that all samples consist of."""


class SleepingConfig(RolloutConfig):
    """What the benchmarks say of it."""

    token_s: float
    """For one token of every sample."""
    slots: int
    """Samples at once; more wait."""
    lengths: Path
    """Numbers of tokens, one a line."""


SPEC: Final = RolloutSpec(
    name="sleeping",
    config_class=SleepingConfig,
    engine=f"{__name__}:SleepingEngine",
    devices=("cpu",),
    gaps=dict.fromkeys(FEATURES, "there is no model"),
    plugin_api_version=2,
)


@cache
def read_lengths(path: Path) -> tuple[int, ...]:
    """Read the file of lengths."""
    return tuple(map(int, path.read_text(encoding="ascii").split()))


def length_of(seed: int, lengths: Sequence[int]) -> int:
    """Return how many tokens the sample with this seed gets."""
    return lengths[seed % len(lengths)]


@dataclass(eq=False, slots=True)
class _Row:
    """A sample."""

    request: GenerationRequest
    index: int
    on_completion: Callable[[Completion], None]
    so_far: Generation
    left: int
    """Tokens that it lacks."""
    since: int | None = None
    """The turn in which it joined."""


class SleepingEngine(RolloutEngine):
    """One thread owns the rows; others leave it requests and the mode."""

    def __init__(self, config: SleepingConfig, model_folder: Path) -> None:
        del model_folder
        self.version = 0
        self.turn_starts: deque[float] = deque(maxlen=64)
        """Of the latest turns, by the clock of all processes."""
        self._config = config
        self._lengths = read_lengths(config.lengths)
        self._changed = threading.Condition()
        self._waiting: deque[_Row] = deque()
        self._ends: defaultdict[int, list[_Row]] = defaultdict(list)
        """By turn, who leaves after it."""
        self._num_running = 0
        self._num_drawn = 0
        self._turn = 0
        self._mode: PauseMode | None = None
        self._is_quiet = False
        self._is_closed = False
        self._begun = 0
        self._checksums: list[int] = []
        self._transport: WeightTransport
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        """CPU time of its own thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        """Let samples wait for a slot."""
        assert not sealed
        rows = []
        for request in requests:
            for index, seed in enumerate(request.seeds):
                so_far = request.so_far[index] if request.so_far else Generation()
                length = min(length_of(seed, self._lengths), request.sampling.max_new_tokens)
                rows.append(_Row(request, index, on_completion, so_far, length - len(so_far.token_ids)))
        with self._changed:
            if self._is_closed:
                raise RolloutError("the rollout engine is closed")
            self._waiting.extend(rows)
            self._changed.notify_all()

    def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens."""
        assert mode == "abort"
        with self._changed:
            self._mode = mode
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_quiet or self._is_closed or self._mode is None)

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._mode, self._is_quiet = None, False
            self._changed.notify_all()

    def close(self) -> None:
        """Give everything back."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> RolloutStats:
        """Return what the engine is doing."""
        with self._changed:
            drawn = sum(self._turn - (row.since or 0) for rows in self._ends.values() for row in rows)
            return RolloutStats(self._num_running, len(self._waiting), drawn_tokens=self._num_drawn + drawn)

    def receivers(self) -> tuple[str, ...]:
        """This process."""
        return ("sleeping",)

    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Open the transport."""
        assert self._is_quiet
        assert plan
        transport.open()
        self._begun, self._transport, self._checksums = version, transport, []

    def load_bucket(self, handle: Any, checksum: int) -> None:
        """Look at the bytes."""
        assert self._transport.read(handle).size
        self._checksums.append(checksum)

    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Acknowledge them."""
        assert version == self._begun
        self.version = version
        return {"sleeping": Acknowledgement(version, combine_checksums(self._checksums))}

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or (self._mode and not self._is_quiet):
                    back = [row for rows in self._ends.values() for row in rows]
                    back += self._waiting
                    self._ends.clear()
                    self._waiting.clear()
                    self._num_running = 0
                    for row in back:
                        self._give_back(row, "interrupted")
                    self._is_quiet = self._is_closed or bool(self._mode)
                    self._changed.notify_all()
                    if self._is_closed:
                        return
                if self._mode or not (self._waiting or self._num_running):
                    self._changed.wait()
                    continue
                self._join()
            self._sleep()
            with self._changed:
                self._turn += 1
                ended = self._ends.pop(self._turn, [])
                self._num_running -= len(ended)
            for row in ended:
                self._give_back(row, "stop")

    def _join(self) -> None:
        for row in list(islice(self._waiting, self._config.slots - self._num_running)):
            self._waiting.popleft()
            row.since = self._turn
            self._ends[self._turn + row.left].append(row)
            self._num_running += 1

    def _sleep(self) -> None:
        """Sleep for a token, counted from when the last one should have ended: a late waking must not add up."""
        now_s = time.monotonic()
        last_s = self.turn_starts[-1] if self.turn_starts else 0.0
        start_s = last_s + self._config.token_s
        if now_s - start_s > self._config.token_s:  # there was a rest
            start_s = now_s
        self.turn_starts.append(start_s)
        time.sleep(max(0.0, start_s + self._config.token_s - now_s))

    def _give_back(self, row: _Row, reason: FinishReason) -> None:
        count = 0 if row.since is None else self._turn - row.since
        self._num_drawn += count
        old = row.so_far
        row.on_completion(
            Completion(
                row.request,
                row.index,
                Generation(
                    [*old.token_ids, *[TOKEN] * count],
                    [*old.log_probs, *[-1.0] * count],
                    [*old.weight_versions, *[self.version] * count],
                    reason,
                ),
            )
        )


class SleepingReward:
    """Takes as long for a response as its generation did."""

    class Config(StrictModel):
        """Of the rollout engine."""

        token_s: float

    def __init__(self, config: Config) -> None:
        self._token_s = config.token_s

    async def __call__(self, data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
        """Count the tokens, which are characters."""
        del data_source, ground_truth, extra_info
        await asyncio.sleep(len(solution_str) * self._token_s)
        return float(len(solution_str))


def make_task(folder: Path) -> None:
    """Make the addition task of the examples: ``train.parquet`` and ``model``."""
    script = Path(__file__).parents[1] / "examples" / "addition_data.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)  # noqa: S603 - our own


@contextmanager
def installed() -> Iterator[Path]:
    """Have this process, and those it starts, find the engine by its name; gives a folder for files."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with TemporaryDirectory() as name:
        folder = Path(name)
        info = folder / "sleeping-1.0.dist-info"
        info.mkdir()
        keyword = f"{ROLLOUT.api_keyword}{ROLLOUT.api_version}"
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.4\nName: sleeping\nVersion: 1.0\nKeywords: {keyword}\n", "ascii"
        )
        info.joinpath("entry_points.txt").write_text(f"[{ROLLOUT.group}]\nsleeping = {Path(__file__).stem}\n", "ascii")
        paths = [name, str(Path(__file__).parent)]
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [before])])
        sys.path[:0] = paths
        try:
            yield folder
        finally:
            sys.path[:] = sys.path[len(paths) :]
            os.environ["PYTHONPATH"] = before
