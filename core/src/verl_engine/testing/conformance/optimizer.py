"""The optimizer step: clipping, AdamW, schedule, and what a gradient that is not finite leaves untouched."""

import math
from typing import Any, Final

from verl_engine.contract.errors import TrainingDivergedError
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_engine.testing.conformance.accumulation import FP16_TOLERANCE, ScaledLoss, without_overflow
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.reference import (
    ReferenceRun,
    furthest,
    make_sequences,
    reference_gradient,
    relative_error,
)

EPS: Final = 1e-4
"""Adam's, in comparisons: with a smaller one, the rounding of a gradient near zero becomes a part of a step."""
SETTINGS: Final[dict[str, Any]] = {
    "learning_rate": 1e-2,
    "eps": EPS,
    "warmup_steps": 2,
    "total_steps": 5,
    "lr_schedule": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
}
MAX_NORM: Final = 0.05
OF_A_STEP: Final = 1e-4
"""How far weights may be off after steps of 1e-2. What a wrong schedule or weight decay leaves is above 1e-3."""
LARGE: Final = 2.0**12
"""Factor on a loss whose gradients overflow float16 at any usual loss scale to begin with."""


def clipping(bench: Bench) -> None:
    """Gradients are clipped to max_grad_norm before the step, by their norm over all parameters and ranks."""
    sequences = make_sequences(8)
    expected = reference_gradient(bench.model(), sequences)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    assert norm > 2 * MAX_NORM, norm
    probe = bench.probe(max_grad_norm=MAX_NORM)
    found = probe.gradient_of(sequences)
    clipped = {name: gradient * (MAX_NORM / (norm + 1e-6)) for name, gradient in expected.items()}
    bench.require_gradient(found, clipped, f"the gradient applied, against the one clipped to {MAX_NORM},")
    assert probe.report is not None
    reported = probe.report.optimizer.grad_norm
    bench.require(math.isclose(reported, norm, rel_tol=1e-5), f"grad_norm is {reported}, before clipping it is {norm}")


def adamw(bench: Bench) -> None:
    """Four steps with warm-up, decay and clipping equal torch's own AdamW in one process."""
    batches = [make_sequences(8, seed=seed) for seed in range(4)]
    factors = [0.5, 1.0, 1.0, 2 / 3]
    reference = ReferenceRun(bench.model(), SETTINGS["learning_rate"], SETTINGS["weight_decay"], MAX_NORM, eps=EPS)
    expected = reference.train(batches, factors)
    driver = bench.driver(**SETTINGS)
    steps = [driver.train(batch).optimizer for batch in batches]
    rates = [step.learning_rate for step in steps]
    right = [SETTINGS["learning_rate"] * factor for factor in factors]
    bench.require(_close(rates, right), f"learning rates were {rates}, not {right}")
    norms = [step.grad_norm for step in steps]
    bench.require(_close(norms, reference.norms, 1e-4), f"norms were {norms}, not {reference.norms}")
    worst, error = furthest(driver.weights(), expected)
    # The weights moved by up to 3e-2.
    bench.require(error <= OF_A_STEP, f"{worst} is off by {error:.3g} after four steps")


def given_rate(bench: Bench) -> None:
    """A step at a rate that is given uses it as it is; the steps after it are where the schedule would be."""
    batches = [make_sequences(8, seed=seed) for seed in range(3)]
    reference = ReferenceRun(bench.model(), SETTINGS["learning_rate"], SETTINGS["weight_decay"], MAX_NORM, eps=EPS)
    expected = reference.train(batches, [0.3, 1.0, 1.0])
    driver = bench.driver(**SETTINGS)
    given = [0.3 * SETTINGS["learning_rate"], None, None]
    rates = [driver.train(batch, rate).optimizer.learning_rate for batch, rate in zip(batches, given, strict=True)]
    right = [SETTINGS["learning_rate"] * factor for factor in (0.3, 1.0, 1.0)]
    bench.require(_close(rates, right), f"learning rates were {rates}, not {right}")
    worst, error = furthest(driver.weights(), expected)
    bench.require(error <= OF_A_STEP, f"{worst} is off by {error:.3g} after a step at a given rate")


def decay_vectors(bench: Bench) -> None:
    """With ``decay_vectors`` weight decay is on norms and biases too, as in torch's own AdamW."""
    batches = [make_sequences(8, seed=seed) for seed in range(2)]
    reference = ReferenceRun(bench.model(), 1e-2, 0.1, MAX_NORM, decay_vectors=True, eps=EPS)
    expected = reference.train(batches, [1.0, 1.0])
    driver = bench.driver(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=MAX_NORM, decay_vectors=True, eps=EPS)
    for batch in batches:
        driver.train(batch)
    worst, error = furthest(driver.weights(), expected)
    bench.require(error <= OF_A_STEP, f"{worst} is off by {error:.3g} with weight decay on vectors")


def schedules(bench: Bench) -> None:
    """Each learning-rate schedule gives the rates that the core defines."""
    sequences = make_sequences(4)
    for schedule, end in (("constant", 0.0), ("linear", 0.1), ("cosine", 0.1), ("wsd", 0.1)):
        # Three steps from the peak to the end: in the middle of two, a cosine is where a straight line is.
        driver = bench.driver(lr_schedule=schedule, warmup_steps=1, total_steps=4, min_lr_ratio=end, learning_rate=1e-3)
        rates = [driver.train(sequences).optimizer.learning_rate for _ in range(6)]
        right = [1e-3 * lr_multiplier(driver.config, step) for step in range(6)]
        bench.require(_close(rates, right), f"the {schedule} schedule gave {rates}, not {right}")


def not_finite(bench: Bench) -> None:
    """A gradient that is not finite on one data-parallel rank is skipped by all; the next step is unaffected."""
    for is_last, value in ((True, float("nan")), (False, float("inf"))):
        skipping, plain = bench.driver(**SETTINGS), bench.driver(**SETTINGS)
        # Ranks that split a model have the same data, and one of them may be alone in computing the loss.
        poisoned = skipping.data_parallel_size - 1 if is_last else 0
        is_poisoned = skipping.engine.data_parallel.rank == poisoned
        batches = [make_sequences(8, seed=seed) for seed in range(4)]
        for driver in (skipping, plain):
            driver.train(batches[0])
        before = skipping.weights()
        report = skipping.step(skipping.micro_batches(batches[1]), ScaledLoss(value if is_poisoned else 1.0))
        bench.require(
            not report.optimizer.applied, f"all ranks must skip a gradient of {value} on data-parallel rank {poisoned}"
        )
        bench.require(
            not math.isfinite(report.optimizer.grad_norm), f"grad_norm is {report.optimizer.grad_norm} for it"
        )
        bench.require_same(skipping.weights(), before, "a skipped step changed weights")
        for batch in batches[2:]:
            found, right = skipping.train(batch).optimizer, plain.train(batch).optimizer
            bench.require(found == right, f"after a skipped step the next gave {found}; without it, it gives {right}")
        why = "; optimizer state was touched"
        bench.require_same(skipping.weights(), plain.weights(), "a skipped step changed what followed", why)


def zeroed(bench: Bench) -> None:
    """Gradients are zero after a step: the next one adds nothing of it."""
    probe = bench.probe()
    first = probe.gradient_of(make_sequences(8, seed=1))
    second = probe.gradient_of(make_sequences(8, seed=2))
    fresh = bench.probe().gradient_of(make_sequences(8, seed=2))
    assert relative_error(first, fresh) > 1e-3  # noqa: PLR2004 - they are different batches
    bench.require_gradient(second, fresh, "the second gradient of an engine", 1e-6)


def giving_up(bench: Bench) -> None:
    """After max_skipped_steps skips in a row every rank stops with the reason."""
    driver = bench.driver(max_skipped_steps=2)
    micro_batches = driver.micro_batches(make_sequences(8))
    first = driver.step(micro_batches, ScaledLoss(math.nan))
    bench.require(not first.optimizer.applied, "a gradient that is not finite was not skipped")
    stop = refusal(TrainingDivergedError, lambda: driver.step(micro_batches, ScaledLoss(math.nan)))
    bench.require(stop is not None, "two skipped steps in a row raised no TrainingDivergedError")


def fp16_overflow(bench: Bench) -> None:
    """A gradient that overflows float16 is skipped by all ranks until the loss scale fits it, and then is right."""
    sequences = make_sequences(8)
    # None of these skips counts: each says that the next step may do.
    probe = bench.probe(**bench.setting_of("fp16"), max_skipped_steps=1)
    right = {name: gradient * LARGE for name, gradient in reference_gradient(bench.model(), sequences).items()}
    found, skipped = without_overflow(bench, probe, bench.divide(probe.driver, sequences, 2), LARGE)
    bench.require(skipped > 0, f"a loss times {LARGE:g} overflowed nothing: is there a loss scale, and is it float16?")
    bench.require_gradient(found, right, f"after {skipped} overflows the gradient", FP16_TOLERANCE)


def _close(found: list[float], expected: list[float], tolerance: float = 1e-6) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, expected, strict=True))


CHECKS = (
    Check("optimizer/clipping", (all_ranks(clipping),)),
    Check("optimizer/adamw", (all_ranks(adamw),)),
    Check("optimizer/given_rate", (all_ranks(given_rate),)),
    Check("optimizer/decay_vectors", (all_ranks(decay_vectors),)),
    Check("optimizer/schedules", (all_ranks(schedules),)),
    Check("optimizer/not_finite", (all_ranks(not_finite),)),
    Check("optimizer/fp16_overflow", (all_ranks(fp16_overflow),), ("fp16",)),
    Check("optimizer/giving_up", (all_ranks(giving_up),)),
    Check("optimizer/zeroed", (all_ranks(zeroed),)),
)
