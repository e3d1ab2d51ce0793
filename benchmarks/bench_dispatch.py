"""What calling an engine's hooks costs beyond calling the engine itself: `dispatch_fraction` of a step of 10 ms.

A step of 8 micro-batches calls `engine_gradient_sync` 8 times and `engine_optimizer_step` once. Host and bare functions
are timed in turn, so that a slow moment of the machine hits both; the metrics are medians. With the observer `timing`
the step has wrappers, and nine clocks to read: its figure stands apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_engine import BackendHost, BackendSpec, Capabilities, EngineConfig, OptimizerStep, hookimpl
from verl_engine.host.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

MICRO_BATCHES = 8
STEP_S = 0.010
STEPS_A_ROUND = 1000
_CONTEXT = nullcontext()
_STEP = OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)


@hookimpl
def engine_create(role: str) -> list[str]:
    """Make an engine of nothing."""
    return [role]


@hookimpl
def engine_gradient_sync(engine: Any, is_last_micro_batch: bool) -> AbstractContextManager[None]:  # noqa: ARG001 - as asked
    """Do nothing: only the way here is measured."""
    return _CONTEXT


@hookimpl
def engine_optimizer_step(engine: Any, learning_rate: float | None) -> OptimizerStep:  # noqa: ARG001 - as asked
    """Do nothing."""
    return _STEP


def make_host(observers: dict[str, object]) -> BackendHost:
    """Host a backend of the functions above."""
    module = ModuleType("bench_hooks")
    hooks = (engine_create, engine_gradient_sync, engine_optimizer_step)
    vars(module).update({hook.__name__: hook for hook in hooks})
    gaps = {"snapshots": "there are no weights"}
    vars(module)["SPEC"] = BackendSpec("bench", EngineConfig, ("cpu",), Capabilities(gaps=gaps))
    return BackendHost.from_module(module, observers=observers)


def seconds_a_step(gradient_sync: Callable[..., Any], optimizer_step: Callable[..., Any], engine: Any) -> float:
    """Time the hook calls of many steps; return the mean of one."""
    start = time.perf_counter()
    for _ in range(STEPS_A_ROUND):
        for index in range(MICRO_BATCHES):
            with gradient_sync(engine, index == MICRO_BATCHES - 1):
                pass
        optimizer_step(engine, None)
    return (time.perf_counter() - start) / STEPS_A_ROUND


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="of 1000 steps each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    plain, timed = make_host({}), make_host({"timing": Timing()})
    engine: Any = ["actor"]
    ways = {
        "direct": (engine_gradient_sync, engine_optimizer_step),
        "host": (plain.gradient_sync, plain.optimizer_step),
        "timing": (timed.gradient_sync, timed.optimizer_step),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 1):
        for name, (gradient_sync, optimizer_step) in ways.items():
            seconds = seconds_a_step(gradient_sync, optimizer_step, engine)
            if round_number:  # the first warms up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    metrics = {
        "dispatch_fraction": (medians["host"] - medians["direct"]) / STEP_S,
        "dispatch_fraction_with_timing": (medians["timing"] - medians["direct"]) / STEP_S,
        "dispatch_us_a_step": (medians["host"] - medians["direct"]) * 1e6,
        "timing_us_a_step": (medians["timing"] - medians["direct"]) * 1e6,
    }
    if not options.json:
        for name, value in medians.items():
            print(f"{name}: {value * 1e6:.2f} us for the hook calls of a step")
    print(json.dumps({name: round(value, 6) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
