"""Several engines in one process: an actor, a reference policy and a critic."""

import gc
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist

from verl_engine.contract.validation import validate
from verl_engine.engine.worker import EngineWorker
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, require
from verl_engine.testing.conformance.gradient_probe import GradientProbe
from verl_engine.testing.conformance.reference import furthest, largest_difference, make_sequences, weighted_loss
from verl_engine.testing.conformance.values import value_loss

ROUNDING: Final = 1e-6


def in_turns(bench: Bench) -> None:
    """An actor, a reference and a critic of one process, used in turns, compute what each computes alone."""
    roles: dict[str, dict[str, Any]] = {"actor": {}, "reference": {"kind": "other", "forward_only": True}}
    if "forward_only" in bench.gaps:
        roles["reference"].pop("forward_only")
    if "value_head" not in bench.gaps:
        roles["critic"] = {"head": "value"}
    alone = zip_longest(*[list(_turns(bench, **settings)) for settings in roles.values()])
    together = zip_longest(*[_turns(bench, **settings) for settings in roles.values()])
    for expected, found in zip(alone, together, strict=True):
        for role, before, beside in zip(roles, expected, found, strict=True):
            if before is None:  # a reference has fewer turns
                continue
            name, distance = furthest(beside, before)
            bench.require(
                distance <= ROUNDING,
                f"{name} of the {role} is off by {distance:.3g} beside other engines of its process",
            )


def _turns(bench: Bench, **settings: Any) -> Iterator[dict[str, torch.Tensor]]:
    build = bench.driver if settings.get("forward_only") else bench.probe
    built = build(**settings)
    is_critic = settings.get("head") == "value"
    yield {"the engine": torch.zeros(())}
    for seed in range(2):
        driver = built.driver if isinstance(built, GradientProbe) else built
        parts = [driver.infer([sequence])[0] for sequence in make_sequences(4, seed)]
        yield {("value" if is_critic else "log-prob") + f" {index}": part for index, part in enumerate(parts)}
        if isinstance(built, GradientProbe):
            own = driver.micro_batches(make_sequences(8, seed), 8)  # some backends take one sequence at a time only
            found = built.gradient(own, value_loss if is_critic else weighted_loss)
            yield {f"the gradient of {name}": part / part.abs().max().clamp_min(1e-12) for name, part in found.items()}


def closing(bench: Bench) -> None:
    """A worker of a process closes, and another goes on as if it had been alone, in the process group that stays."""
    alone = bench.driver().worker
    expected = [*_use(alone), *_use(alone)]
    actor, other = _start(bench), _start(bench, "other")
    found = _use(actor)
    _use(other)
    _close(other)
    found += _use(actor)
    _close(actor)
    distance = largest_difference(found, expected)
    bench.require(
        distance <= ROUNDING, f"after another worker of its process was closed, an engine is off by {distance:.3g}"
    )


def _start(bench: Bench, kind: str = "plain") -> EngineWorker:
    config_class = BackendHost.load(bench.subject.backend).spec.config_class
    config = validate(config_class, bench.subject.section(), at="engine")
    worker = EngineWorker(config, bench.model(kind), bench.rank, bench.world_size)
    worker.prepare()
    worker.create()
    return worker


def _use(worker: EngineWorker) -> list[torch.Tensor]:
    data, sequences = worker.engine.data_parallel, make_sequences(8)
    own = sequences[data.rank :: data.size]
    report = worker.train_batch([own[index : index + 1] for index in range(len(sequences))], weighted_loss)
    found = worker.infer_batch([[sequence] for sequence in sequences[:4]])
    return [torch.tensor(report.loss), *(torch.from_numpy(part) for (part,) in found)]


def _close(worker: EngineWorker) -> None:
    worker.close()
    gc.collect()  # what an engine does when it goes, too
    require(dist.is_initialized(), "a worker that was closed ended a process group that others use")


CHECKS = (
    Check("several_engines/in_turns", (all_ranks(in_turns),)),
    Check("several_engines/closing", (all_ranks(closing),)),
)
