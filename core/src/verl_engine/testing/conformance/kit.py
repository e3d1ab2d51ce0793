"""Runs checks on an installed backend. Imports no torch."""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError, PluginError, UnknownPluginError
from verl_engine.contract.kinds import BACKEND
from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.loading import find_plugin
from verl_engine.testing.conformance.check import Check, Phase, SkipCheckError, Subject, all_checks
from verl_engine.testing.conformance.fresh import FreshProcessError, run_fresh
from verl_engine.testing.kits import Outcome
from verl_engine.testing.rank_pool import RankError, RankPool
from verl_engine.testing.rank_pools import RankPools

_MOST_RANKS: Final = 1024


class ConformanceKit(AbstractContextManager["ConformanceKit"]):
    """Runs one check after the other on ranks that stay; use it in a ``with``."""

    def __init__(
        self,
        backend: str,
        settings: Mapping[str, Any] | None = None,
        *,
        ranks: int = 2,
        timeout_s: float = 60.0,
        lender: Callable[[int], RankPool] | None = None,
    ) -> None:
        """Find the backend; nothing is started yet.

        Args:
            backend: its name, as ``verl-engine backends`` lists it.
            settings: fields of the engine section for every engine that is built, besides those that a check sets.
            ranks: how many there are where a check wants several.
            timeout_s: for each step of a check; ranks that are silent then are named and killed.
            lender: gives so many ranks that others use too, for backends that prepare nothing; else the kit starts its
                own.
        Raises:
            ConfigError: a number, or a setting, cannot be used.
            PluginError: none, or several, have the name.
        """
        if ranks < 1:
            raise ConfigError(f"ranks={ranks} must be at least 1")
        if ranks > _MOST_RANKS:
            raise ConfigError(f"ranks={ranks} must be at most {_MOST_RANKS}: all are processes of this machine")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout={timeout_s} must be a number of seconds above 0")
        if (settings or {}).get("param_dtype", "float32") != "float32":
            raise ConfigError(
                f"param_dtype={(settings or {})['param_dtype']}: the kit compares in float32, and has checks of its "
                "own for what else a backend computes in; leave param_dtype out"
            )
        entry = find_plugin(BACKEND, backend)
        self.version = entry.origin
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._spec: BackendSpec | None = None
        self._load_failure = ""
        try:
            self._spec = BackendHost.load(backend).spec
        except UnknownPluginError:
            raise
        except PluginError as error:
            self._load_failure = str(error)
        on_cpu = {"device": "cpu"} if self._spec is None or "cpu" in self._spec.devices else {}
        self._subject = Subject(backend, {**on_cpu, **(settings or {})}, entry.distribution)
        self._config: EngineConfig | None = None
        if self._spec is not None:
            self._config = validate(self._spec.config_class, self._subject.section(), at="engine")
            self._config.validate_world(self._num_ranks())
        self._device = "cpu" if self._config is None else self._config.device
        self._scratch = tempfile.TemporaryDirectory(prefix="verl-engine-check-")
        self._lender = lender
        self._pools = RankPools()
        self._prepare = partial(prepare_rank, self._subject)

    def __exit__(self, *_: object) -> None:
        self.close()

    all_checks = staticmethod(all_checks)

    def run(self, check: Check) -> Outcome:
        """Run one check. Whatever the backend does, this returns."""
        start = time.monotonic()
        reason = self._reason_to_skip(check)
        if reason:
            return Outcome(check, "skipped", reason)
        status: Any = "passed"
        details = ""
        folder = Path(tempfile.mkdtemp(prefix=f"{check.name.replace('/', '-')}-", dir=self._scratch.name))
        try:
            for phase in check.phases:
                self._run_phase(phase, folder)
        except SkipCheckError as skip:
            status, reason = "skipped", str(skip)
        except (FreshProcessError, RankError) as error:
            status, reason, details = "failed", error.summary, error.details
        return Outcome(check, status, reason, details, time.monotonic() - start)

    def close(self) -> None:
        """End all ranks. Harmless when called twice."""
        self._pools.close()
        self._scratch.cleanup()

    def _reason_to_skip(self, check: Check) -> str:
        is_fresh = all(phase.place == "fresh process" for phase in check.phases)
        if self._spec is None:
            return "" if is_fresh else f"it cannot be loaded: {self._load_failure}"
        for feature in check.features:
            gap = self._spec.capabilities.gaps.get(feature)
            if gap is not None:
                return f"declared gap {feature!r}: {gap}"
        if "multi_rank" in check.features and self.ranks < 2:  # noqa: PLR2004 - several
            return "shows nothing on a single rank; ask for more, such as --ranks 2"
        if any(phase.place == "one rank" for phase in check.phases):
            assert self._config is not None
            try:
                self._config.validate_world(1)
            except ConfigError as error:
                return f"takes a single rank too, which these settings do not: {error}"
        return ""

    def _run_phase(self, phase: Phase, folder: Path) -> None:
        if phase.place == "fresh process":
            run_fresh(phase.function, self._subject, folder, self._timeout_s)
            return
        size = 1 if phase.place == "one rank" else self._num_ranks()
        models = Path(self._scratch.name) / "models"
        models.mkdir(exist_ok=True)
        reasons = self._pool(size).run(
            run_on_rank, phase.function, self._subject, size, models, folder, timeout_s=self._timeout_s
        )
        skipped = [reason for reason in reasons if reason is not None]
        if skipped:
            raise SkipCheckError(skipped[0])

    def _num_ranks(self) -> int:
        assert self._spec is not None
        return 1 if "multi_rank" in self._spec.capabilities.gaps else self.ranks

    def _pool(self, size: int) -> RankPool:
        if self._lender is not None:
            return self._lender(size)
        assert self._spec is not None
        before = self._spec.must_precede
        return self._pools.get(size, prepare=self._prepare, must_precede=before, tidy=None, device=self._device)


def prepare_rank(subject: Subject) -> None:
    """Let the backend prepare the process, as a worker would."""
    host = BackendHost.load(subject.backend)
    host.prepare_process(validate(host.spec.config_class, subject.section(), at="engine"))


def run_on_rank(
    rank: int, function: Callable[[Any], None], subject: Subject, world_size: int, models: Path, folder: Path
) -> str | None:
    """Call the function with this rank's bench; return why it was skipped, if it was."""
    from verl_engine.testing.conformance.bench import Bench  # imports torch: a rank prepares itself first

    gaps = dict(BackendHost.load(subject.backend).spec.capabilities.gaps)
    try:
        function(Bench(subject, rank, world_size, gaps, models, folder))
    except SkipCheckError as skip:
        return str(skip)
    return None
