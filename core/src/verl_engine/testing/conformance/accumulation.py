"""The accumulation contract: the gradient is that of the global batch, however it is split."""

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import TokenOutput
from verl_engine.engine.metrics import Metric
from verl_engine.engine.train_step import Normalizer
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, one_rank, require
from verl_engine.testing.conformance.driver import Split
from verl_engine.testing.conformance.gradient_probe import GradientProbe
from verl_engine.testing.conformance.reference import (
    accumulate,
    draw_ids,
    furthest_gradient,
    load_reference,
    make_sequences,
    masked_log_probs,
    reference_gradient,
    weighted_loss,
    with_temperatures,
)

NUM_SEQUENCES: Final = 12
NUM_SPLITS: Final = 8
TOLERANCE: Final = 1e-5
FP16_TOLERANCE: Final = 0.02
SMALL: Final = 2.0**-20
"""Factor on a loss whose gradients float16 rounds to zero."""
SMALL_TOLERANCE: Final = 0.05
"""With a usual loss scale they are still near the end of float16's range, and ranks that split sums round each part."""
MAX_OVERFLOWS: Final = 40
"""By so many powers of two a loss scale may begin too high."""


class ScaledLoss:
    """The kit's loss times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute it."""
        loss, metrics = weighted_loss(output, batch)
        return loss * self._factor, metrics


def draw_split(seed: int, data_parallel_size: int, *, one_each: bool = False) -> Split:
    """Divide all sequences over data-parallel ranks and up to five micro-batches at random, empty ones too.

    With `one_each` at most one sequence per micro-batch, for engines that cannot run several at once.
    """
    random = np.random.default_rng(seed)
    count = NUM_SEQUENCES if one_each else int(random.integers(1, 6))
    split: Split = [[[] for _ in range(count)] for _ in range(data_parallel_size)]
    for index in range(NUM_SEQUENCES):
        at = index if one_each else int(random.integers(count))
        split[int(random.integers(data_parallel_size))][at].append(index)
    return split


def drawn_splits(bench: Bench) -> None:
    """The gradient equals that of the global batch to 1e-5, for splits drawn at random."""
    check_splits(bench)


def check_splits(bench: Bench, **settings: str) -> None:
    """Compare the gradient of several splits with the reference; one engine lives through all of them."""
    sequences = make_sequences(NUM_SEQUENCES)
    expected = reference_gradient(bench.model(), sequences)
    probe = bench.probe(**settings)
    for seed in range(NUM_SPLITS):
        split = draw_split(seed, probe.driver.data_parallel_size, one_each="packed_batches" in bench.gaps)
        found = probe.gradient(probe.driver.take(sequences, split))
        bench.require_gradient(found, expected, f"for the split {split}, the gradient")


def rank_without_data(bench: Bench) -> None:
    """A rank whose micro-batches are all empty still takes part, and the gradient stays right."""
    sequences = make_sequences(NUM_SEQUENCES)
    probe = bench.probe()
    halves = [[index] for index in range(NUM_SEQUENCES)]
    split: Split = [halves] + [[[] for _ in halves] for _ in range(probe.driver.data_parallel_size - 1)]
    found = probe.gradient(probe.driver.take(sequences, split))
    bench.require_gradient(found, reference_gradient(bench.model(), sequences), "with empty micro-batches the gradient")


def tied(bench: Bench) -> None:
    """Where the output layer is the embedding, the gradient is the sum over both uses."""
    _check_shares(bench, "tied", 1.0)


def temperature(bench: Bench) -> None:
    """In training as in inference, the temperature divides the logits."""
    _check_shares(bench, "plain", 0.5)


def token_temperatures(bench: Bench) -> None:
    """Where each token has a temperature of its own, it divides that token's logits, in training and in inference."""
    sequences = with_temperatures(make_sequences(NUM_SEQUENCES))
    probe = bench.probe()
    found = probe.gradient(bench.divide(probe.driver, sequences))
    expected = reference_gradient(bench.model(), sequences)
    bench.require_gradient(found, expected, "the gradient with a temperature per token")
    log_probs, model = probe.driver.infer(sequences[:1]), load_reference(bench.model())
    distance = float((log_probs[0] - masked_log_probs(model, sequences[0])).abs().max())
    bench.require(distance <= TOLERANCE, f"log-probs with a temperature per token are off by {distance:.3g}")


def fields(bench: Bench) -> None:
    """A loss gets its sequences' fields of any trailing shape and dtype, each value with its token."""
    random = np.random.default_rng(3)
    sequences = [
        replace(sequence, fields={**sequence.fields, **_fields(sequence.token_ids, random)})
        for sequence in make_sequences(NUM_SEQUENCES)
    ]
    driver = bench.driver()
    found = driver.step(bench.divide(driver, sequences), check_fields)
    odd = {name: value for name, value in found.metrics.items() if value}
    bench.require(not odd, f"fields of the sequences came to the loss otherwise: {odd} per loss token")


def _fields(ids: npt.NDArray[np.int64], random: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    noise = random.integers(0, 100, (len(ids), 2, 3))
    return {"routed": noise + 100 * ids[:, None, None], "flags": ids % 2 == 1, "bytes": ids.astype(np.uint8)}


def check_fields(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The kit's loss; as metrics, how many values of each field are not where they belong, or not what they were."""
    loss, _ = weighted_loss(output, batch)
    wrong = dict.fromkeys(("routed", "flags", "bytes"), torch.zeros((), device=loss.device))
    if batch.loss_positions.numel():
        ids, fields = batch.input_ids, batch.fields
        wrong["routed"] = (fields["routed"] // 100 != ids[:, None, None]).sum().float()
        wrong["flags"] = (fields["flags"] != (ids % 2 == 1)).sum().float()
        wrong["bytes"] = (fields["bytes"] != ids).sum().float()
        kinds = {"routed": torch.int64, "flags": torch.bool, "bytes": torch.uint8}
        for name, dtype in kinds.items():
            if fields[name].dtype != dtype:
                wrong[name] = wrong[name] + batch.num_tokens
    return loss, wrong


def _check_shares(bench: Bench, kind: str, at: float) -> None:
    sequences = make_sequences(NUM_SEQUENCES)
    probe = bench.probe(kind)
    found = probe.gradient(bench.divide(probe.driver, sequences), temperature=at)
    expected = reference_gradient(bench.model(kind), sequences, at)
    bench.require_gradient(found, expected, f"the gradient of the {kind} model at temperature {at}")


def normalizers(bench: Bench) -> None:
    """Divided by its sequences or by a constant, the gradient is that of the global batch, however it is split."""
    sequences = make_sequences(NUM_SEQUENCES)
    tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    rows = sum(sequence.num_loss_tokens > 0 for sequence in sequences)
    plain = reference_gradient(bench.model(), sequences)
    probe = bench.probe()
    micro_batches = bench.divide(probe.driver, sequences)
    choices: tuple[tuple[Normalizer, float], ...] = (("sequences", rows), (7.5, 7.5))
    for normalizer, number in choices:
        found = probe.gradient(micro_batches, normalizer=normalizer)
        expected = {name: gradient * (tokens / number) for name, gradient in plain.items()}
        bench.require_gradient(found, expected, f"the gradient divided by {normalizer}")


def reported_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor | Metric]]:
    """The kit's loss, with metrics of all kinds."""
    loss, sums = weighted_loss(output, batch)
    lengths = torch.tensor([float(length) for length in batch.lengths])
    more = {
        "mean": Metric(lengths.sum(), "mean", float(len(lengths))),
        "max": Metric(lengths.max(), "max"),
        "min": Metric(lengths.min(), "min"),
    }
    return loss, {**sums, **more}


def report(bench: Bench) -> None:
    """Loss, metrics and counts of a step are those of the global batch, on every rank."""
    sequences = make_sequences(NUM_SEQUENCES)
    loss, log_prob = accumulate(load_reference(bench.model()), sequences)
    driver = bench.driver()
    micro_batches = bench.divide(driver, sequences)
    found = driver.step(micro_batches, reported_loss)
    every = [len(row) for part in _with_loss(sequences, driver.data_parallel_size, len(micro_batches)) for row in part]
    right = {"log_prob": log_prob, "mean": sum(every) / len(every), "max": float(max(every)), "min": float(min(every))}
    metrics, tolerances = found.metrics, {"log_prob": 1e-5}
    bench.require(
        metrics.keys() == right.keys()
        and all(math.isclose(metrics[name], right[name], rel_tol=tolerances.get(name, 1e-6)) for name in right),
        f"the metrics of the step are {metrics}, not {right}",
    )
    bench.require(math.isclose(found.loss, loss, rel_tol=1e-5, abs_tol=1e-6), f"the loss is {found.loss}, not {loss}")
    count = sum(sequence.num_loss_tokens for sequence in sequences)
    bench.require(found.num_loss_tokens == count, f"{found.num_loss_tokens} loss tokens were counted, not {count}")


def _with_loss(sequences: list[Sequence], data_parallel_size: int, num_micro_batches: int) -> list[list[Sequence]]:
    """List micro-batches of all data-parallel ranks, as `Driver.micro_batches` divides them, that have loss tokens."""
    dealt = [sequences[rank::data_parallel_size] for rank in range(data_parallel_size)]
    parts = [own[index::num_micro_batches] for own in dealt for index in range(num_micro_batches)]
    return [part for part in parts if any(sequence.num_loss_tokens for sequence in part)]


def bf16(bench: Bench) -> None:
    """In bfloat16 gradients are accumulated and weights kept in float32."""
    settings = bench.setting_of("bf16")
    groups = _equal_groups(4)
    whole = [sequence for group in groups for sequence in group]
    probe = bench.probe(**settings)
    parts = [probe.gradient_of(group, 1) for group in groups]
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    own = [probe.driver.micro_batches(group, 1)[0] for group in groups]
    found = probe.gradient(own)
    # Powers of two apart in scale, so bfloat16 rounds each part alike: only the adding up differs.
    bench.require_gradient(found, mean, "not added up in float32: four micro-batches' sum, against one by one,")
    worst, distance = furthest_gradient(found, reference_gradient(bench.model(), whole))
    bench.require(
        TOLERANCE < distance < 0.2,  # noqa: PLR2004 - bfloat16 has three digits
        f"the gradient of {worst} is {distance:.3g} from float32's; bfloat16 gives something between {TOLERANCE} and "
        "0.2",
    )
    _require_small_steps(bench, settings, whole)


def fp16(bench: Bench) -> None:
    """In float16 gradients are float32's to three digits, those too small for float16's range too."""
    sequences = make_sequences(NUM_SEQUENCES)
    expected = reference_gradient(bench.model(), sequences)
    for factor, kind, most in ((1.0, "plain", FP16_TOLERANCE), (SMALL, "small", SMALL_TOLERANCE)):
        probe = bench.probe(**bench.setting_of("fp16"))  # a loss scale of its own
        found, _ = without_overflow(bench, probe, bench.divide(probe.driver, sequences), factor)
        right = {name: gradient * factor for name, gradient in expected.items()}
        worst, distance = furthest_gradient(found, right)
        bench.require(
            TOLERANCE < distance < most,
            f"the gradient of a {kind} loss is {distance:.3g} from float32's in {worst}; float16 gives something "
            f"between {TOLERANCE} and {most}, with a loss scale",
        )


def without_overflow(
    bench: Bench, probe: GradientProbe, micro_batches: list[list[Sequence]], factor: float
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradient of the kit's loss times a factor, and how many steps were skipped first for overflows."""
    for skipped in range(MAX_OVERFLOWS):
        found = probe.gradient(micro_batches, ScaledLoss(factor))
        assert probe.report is not None
        if probe.report.optimizer.applied:
            return found, skipped
        changed = [name for name, gradient in found.items() if bool(gradient.any())]
        bench.require(not changed, f"a step that overflowed changed {', '.join(changed[:5])}")
        bench.require(probe.report.optimizer.overflow, "a step that overflowed did not say so")
    raise AssertionError(
        f"{MAX_OVERFLOWS} steps in a row overflowed with a loss times {factor:g}: the loss scale is never lowered"
    )


def _equal_groups(num_groups: int) -> list[list[Sequence]]:
    random = np.random.default_rng(5)
    groups = []
    for _ in range(num_groups):
        mask = np.ones(8, np.bool_)
        mask[0] = False
        group = [
            Sequence(draw_ids(random, 8), mask, {"weight": random.normal(size=8).astype(np.float32)}) for _ in range(4)
        ]
        groups.append(group)
    return groups


def _require_small_steps(bench: Bench, settings: dict[str, str], sequences: list[Sequence]) -> None:
    driver = bench.driver(**settings, learning_rate=1e-6, weight_decay=0.0)
    before = driver.weights()
    for _ in range(3):
        driver.train(sequences)
    name = max(before, key=lambda key: before[key].numel())
    moved = (driver.weights()[name].float() - before[name].float()).abs()
    is_float32 = before[name].dtype == torch.float32
    bench.require(
        not is_float32 or 1e-7 < float(moved.median()) < 1e-5,  # noqa: PLR2004 - about three times the learning rate
        f"three steps at learning rate 1e-6 moved {name} by {float(moved.median()):.3g}: no float32 master weights",
    )


def one_rank_splits(bench: Bench) -> None:
    """On a single rank the gradient equals that of the global batch to 1e-5, for splits drawn at random."""
    require(bench.world_size == 1, "runs on one rank")
    check_splits(bench)


CHECKS = (
    Check("accumulation/one_rank", (one_rank(one_rank_splits),)),
    Check("accumulation/all_ranks", (all_ranks(drawn_splits),), ("multi_rank",)),
    Check("accumulation/rank_without_data", (all_ranks(rank_without_data),), ("multi_rank",)),
    Check("accumulation/tied", (all_ranks(tied),)),
    Check("accumulation/temperature", (all_ranks(temperature),)),
    Check("accumulation/token_temperatures", (all_ranks(token_temperatures),)),
    Check("accumulation/fields", (all_ranks(fields),)),
    Check("accumulation/normalizers", (all_ranks(normalizers),)),
    Check("accumulation/report", (all_ranks(report),)),
    Check("accumulation/bf16", (all_ranks(bf16),), ("bf16",)),
    Check("accumulation/fp16", (all_ranks(fp16),), ("fp16",)),
)
