"""Runs checks on an installed rollout engine."""

from __future__ import annotations

import inspect
import math
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_async.rollout.kind import ROLLOUT
from verl_async.rollout.kit import pauses, requests, routes, sampling, weights
from verl_async.rollout.kit.bench import Bench
from verl_async.rollout.spec import FEATURES
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_engine.host.loading import find_plugin, load_entry
from verl_engine.testing.conformance.check import SkipCheckError
from verl_engine.testing.kits import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Check:
    """Something that the interface asks for, with the function that finds out."""

    name: str
    """``topic/what``."""
    function: Callable[[Bench], None]
    """Raises where the engine is wrong."""
    features: tuple[str, ...] = ()
    """Of `FEATURES`; an engine that declares one of them a gap skips the check."""

    def __post_init__(self) -> None:
        assert set(self.features) <= FEATURES.keys(), self.features

    @property
    def proves(self) -> str:
        """The rule, in a sentence."""
        return (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")


CHECKS = (
    Check("log_probs/temperature_one", sampling.temperature_one),
    Check("log_probs/temperatures", sampling.temperatures),
    Check("log_probs/greedy", sampling.greedy),
    Check("log_probs/filtered", sampling.filtered),
    Check("log_probs/not_wanted", sampling.not_wanted),
    Check("sampling/distribution", sampling.distribution),
    Check("sampling/top_k_top_p", sampling.top_k_top_p),
    Check("sampling/seeds", sampling.seeds, ("seeds",)),
    Check("requests/lengths", requests.lengths),
    Check("requests/stop_tokens", requests.stop_tokens),
    Check("requests/stop_strings", requests.stop_strings, ("stop_strings",)),
    Check("requests/samples", requests.samples),
    Check("requests/one_by_one", requests.one_by_one),
    Check("requests/so_far", requests.so_far),
    Check("requests/many", requests.many),
    Check("requests/sealed", requests.sealed, ("sealed", "seeds")),
    Check("requests/group_prompt", requests.group_prompt, ("affinity",)),
    Check("requests/next_turn", requests.next_turn, ("affinity",)),
    Check("routes/read", routes.read, ("routes",)),
    Check("routes/goes_on", routes.goes_on, ("routes",)),
    Check("routes/over_update", routes.over_update, ("routes",)),
    Check("pauses/abort", pauses.abort),
    Check("pauses/keep", pauses.keep, ("keep",)),
    Check("pauses/wait", pauses.wait),
    Check("pauses/idle", pauses.idle),
    Check("pauses/at_once", pauses.at_once),
    Check("weights/used", weights.used),
    Check("weights/version_per_token", weights.version_per_token),
    Check("weights/keep_over_update", weights.keep_over_update, ("keep",)),
    Check("weights/cache_is_dropped", weights.cache_is_dropped),
    Check("weights/tied", weights.tied),
    Check("weights/incomplete", weights.incomplete),
    Check("weights/wrong", weights.wrong),
    Check("weights/doubled", weights.doubled),
    Check("weights/only_paused", weights.only_paused),
    Check("weights/save_pretrained", weights.save_pretrained, ("save_pretrained",)),
    Check("ends/close_in_generation", pauses.close_in_generation),
    Check("ends/dies", pauses.dies),
)


class RolloutKit:
    """Runs one check after the other, in this process and in those that the engine starts."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        ranks: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        """Find and load the engine.

        Args:
            name: as ``verl-engine plugins --kind rollout`` lists it.
            settings: fields of the rollout section, for every engine that is built.
            ranks: 1; an engine decides on its processes itself.
            timeout_s: for each wait of a check, and for ten times as long the whole check.
        Raises:
            ConfigError: `ranks` is not 1, `timeout_s` is no time, the settings do not fit, or ask for another dtype
                than float32.
            PluginError: the engine cannot be loaded.
        """
        if ranks != 1:
            raise ConfigError(f"ranks={ranks} must be left out: a rollout engine decides on its processes itself")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout={timeout_s} must be a number of seconds above 0")
        entry = find_plugin(ROLLOUT, name)
        self.version = entry.origin
        self.ranks = ranks
        self._spec = load_entry(entry).spec
        self._timeout_s = timeout_s
        on_cpu = {"device": "cpu"} if "cpu" in self._spec.devices else {}
        section = {"backend": name, **on_cpu, **(settings or {})}
        if validate(self._spec.config_class, section, at="rollout").dtype != "float32":
            raise ConfigError("rollout.dtype: the kit compares in float32; leave dtype out")
        self._scratch = tempfile.TemporaryDirectory(prefix="verl-engine-check-")
        self._bench = Bench(self._spec, section, Path(self._scratch.name), timeout_s)

    @staticmethod
    def all_checks() -> tuple[Check, ...]:
        """Return every check, in the order in which they run."""
        return CHECKS

    def run(self, check: Check) -> Outcome:
        """Run one check. Whatever the engine does, this returns."""
        for feature in check.features:
            if feature in self._spec.gaps:
                return Outcome(check, "skipped", f"declared gap {feature!r}: {self._spec.gaps[feature]}")
        start = time.monotonic()
        found: list[Outcome] = []

        def run() -> None:
            status: Any = "passed"
            reason = details = ""
            try:
                check.function(self._bench)
            except SkipCheckError as skip:
                status, reason = "skipped", str(skip)
            except BaseException as error:  # noqa: BLE001 - an engine can raise anything
                status, reason = "failed", str(error) if isinstance(error, AssertionError) else repr(error)
                details = traceback.format_exc()
            found.append(Outcome(check, status, reason, details, time.monotonic() - start))

        # In a thread: an engine that never comes back must not keep the kit.
        thread = threading.Thread(target=run, name=check.name, daemon=True)
        thread.start()
        thread.join(10 * self._timeout_s)
        if not found:
            self._bench = self._bench.replaced()
            return Outcome(
                check, "failed", f"did not end within {10 * self._timeout_s:g} s", "", time.monotonic() - start
            )
        self._bench.end_check(failed=found[0].status == "failed")
        return found[0]

    def close(self) -> None:
        """End all engines. Harmless when called twice."""
        self._bench.close()
        self._scratch.cleanup()
