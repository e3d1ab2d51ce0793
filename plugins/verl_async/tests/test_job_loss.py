"""The loss of a job against its formulas written out in float64, gradients too; what travels; what is refused."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from verl_async.algorithms.algorithm import Algorithm
from verl_async.config import AlgorithmConfig
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.base import TokenOutput
from verl_engine.engine.metrics import Totals

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from verl_async.algorithms.job_loss import JobLoss
    from verl_engine.engine.metrics import Metric

COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_probs")
Result = tuple[float, dict[str, float], list[float], list[float]]


def loss_of(**algorithm: Any) -> JobLoss:
    return Algorithm.load(AlgorithmConfig.model_validate(algorithm)).loss


def draw(seed: int) -> tuple[list[Sequence], torch.Tensor, torch.Tensor]:
    """Two responses of 5 and 9 tokens; log-probs and entropies in float64. Outside the loss all columns are junk."""
    generator = np.random.default_rng(seed)
    sequences = []
    for length in (5, 9):
        mask = np.arange(length) >= 2
        fields = {name: np.where(mask, generator.normal(-1, 0.4, length), np.nan) for name in COLUMNS}
        fields["advantages"] = np.where(mask, generator.normal(0, 2, length), np.nan)
        sequences.append(Sequence(np.arange(length), mask, {key: v.astype(np.float32) for key, v in fields.items()}))
    log_probs, entropy = (torch.tensor(generator.normal(-1, 0.4, 14), requires_grad=True) for _ in range(2))
    return sequences, log_probs, entropy


def expected(
    sequences: list[Sequence], log_probs: torch.Tensor, entropy: torch.Tensor, *, low: float = 0.2, high: float = 0.28,
    cap: float | None = 2.0, kl: tuple[str, float] | None = None, bonus: float = 0.0,
) -> Result:  # fmt: skip
    """Token by token, in Python's float64; the gradients by hand."""
    total, start, metrics = 0.0, 0, dict.fromkeys(("ratio", "clip_fraction", "approx_kl", "importance_weight"), 0.0)
    metrics |= {"kl": 0.0, "entropy": 0.0}
    by_log_prob, by_entropy = [0.0] * len(log_probs), [0.0] * len(log_probs)
    for sequence in sequences:
        for at in np.flatnonzero(sequence.loss_mask):
            old, rollout, ref = (float(sequence.fields[name][at]) for name in COLUMNS)
            advantage, current = float(sequence.fields["advantages"][at]), log_probs[start + at].item()
            ratio = math.exp(current - old)
            clipped = min(max(ratio, 1 - low), 1 + high)
            is_clipped = clipped * advantage < ratio * advantage
            weight = 1.0 if cap is None else min(math.exp(old - rollout), cap)
            total -= weight * min(ratio * advantage, clipped * advantage)
            by_log_prob[start + at] = 0.0 if is_clipped else -weight * ratio * advantage
            r = math.exp(ref - current)
            terms = {
                "k1": (current - ref, 1.0),
                "k2": ((current - ref) ** 2 / 2, current - ref),
                "k3": (r - 1 - (ref - current), 1 - r),
            }
            if kl is not None:
                value, gradient = terms[kl[0]]
                total += kl[1] * value
                by_log_prob[start + at] += kl[1] * gradient
                metrics["kl"] += value
            total -= bonus * entropy[start + at].item()
            by_entropy[start + at] = -bonus
            found = (ratio, float(is_clipped), ratio - 1 - (current - old), weight, entropy[start + at].item())
            for name, number in zip(
                ("ratio", "clip_fraction", "approx_kl", "importance_weight", "entropy"), found, strict=True
            ):
                metrics[name] += number
        start += len(sequence)
    count = sum(sequence.num_loss_tokens for sequence in sequences)
    if kl is None:
        del metrics["kl"]
    if cap is None:
        del metrics["importance_weight"]
    return total, {name: value / count for name, value in metrics.items()}, by_log_prob, by_entropy


def computed(loss_fn: JobLoss, sequences: list[Sequence], log_probs: torch.Tensor, entropy: torch.Tensor) -> Result:
    batch = PackedBatch.from_sequences(sequences)
    loss, metrics = loss_fn(TokenOutput(log_probs, entropy), batch)
    first, second = torch.autograd.grad(loss, (log_probs, entropy), allow_unused=True, materialize_grads=True)
    return loss.item(), reduced(metrics), first.tolist(), second.tolist()


def reduced(metrics: Mapping[str, torch.Tensor | Metric]) -> dict[str, float]:
    from verl_engine.engine.process_group import DataParallel

    totals = Totals(torch.device("cpu"))
    totals.add(torch.zeros(()), metrics, has_loss_tokens=True)
    return totals.reduced(DataParallel(0, 1, None), 1000.0)[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({}, {}),  # DAPO's clips
        ({"loss_config": {"clip_low": 0.1, "importance_cap": None}}, {"low": 0.1, "cap": None}),
        ({"loss_config": {"clip_high": 0.05}}, {"high": 0.05}),
        ({"loss_config": {"importance_cap": 1.1}}, {"cap": 1.1}),
        ({"kl": {"estimator": "k1", "coefficient": 0.5}}, {"kl": ("k1", 0.5)}),
        ({"kl": {"estimator": "k2", "coefficient": 0.5}}, {"kl": ("k2", 0.5)}),
        ({"kl": {"estimator": "k3", "coefficient": 0.5}}, {"kl": ("k3", 0.5)}),
        ({"kl": {"where": "reward"}}, {}),  # nothing of it in the loss
        ({"entropy_coefficient": 0.3}, {"bonus": 0.3}),
        ({"entropy_coefficient": 0.3, "kl": {"coefficient": 2.0}}, {"bonus": 0.3, "kl": ("k3", 2.0)}),
    ],
)  # fmt: skip
def test_it_equals_its_formula(settings: dict[str, Any], formula: dict[str, Any], seed: int) -> None:
    data = draw(seed)
    loss, metrics, *gradients = computed(loss_of(**settings), *data)
    right_loss, right_metrics, *right_gradients = expected(*data, **formula)
    assert loss == pytest.approx(right_loss, rel=1e-6, abs=1e-6)
    assert metrics == pytest.approx(right_metrics, rel=1e-5)
    assert gradients == [pytest.approx(right, rel=1e-6, abs=1e-6) for right in right_gradients]


def test_without_an_entropy_there_is_no_metric_of_it() -> None:
    sequences, log_probs, _ = draw(0)
    _, metrics = loss_of()(TokenOutput(log_probs), PackedBatch.from_sequences(sequences))
    assert "entropy" not in metrics


@pytest.mark.parametrize("settings", [{}, {"loss_config": {"importance_cap": None}}, {"kl": {}}])
def test_a_micro_batch_without_sequences_adds_zero_but_has_a_gradient(settings: dict[str, Any]) -> None:
    log_probs = torch.zeros(1, requires_grad=True)
    loss, metrics = loss_of(**settings)(TokenOutput(log_probs), PackedBatch.from_sequences([]))
    loss.backward()
    assert loss.item() == 0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0]
    # The names must not depend on the data: ranks add metrics up by name.
    sequences, log_probs, _ = draw(0)
    _, others = loss_of(**settings)(TokenOutput(log_probs), PackedBatch.from_sequences(sequences))
    assert metrics.keys() == others.keys()


def test_what_travels_is_text() -> None:
    loss = loss_of(loss_config={"clip_low": 0.1})
    data = pickle.dumps(loss)
    assert pickle.loads(data) == loss  # noqa: S301 - our own bytes
    assert b"PpoLoss" not in data
    assert b'"clip_low": 0.1' in data


OWN = """
from verl_async.algorithms.columns import with_columns
from verl_engine.contract.strict_model import StrictModel


class Config(StrictModel):
    scale: float = 2.0


class Scaled:
    Config = Config
    columns = ("rewards", "reward/format")

    def __init__(self, config):
        self.config = config
        self.num_calls = 0

    def __call__(self, output, batch):
        self.num_calls += 1
        at = batch.loss_positions
        number = batch.fields["rewards"][at] + batch.fields["reward/format"][at]
        calls = output.log_probs.new_tensor(self.num_calls)
        return -self.config.scale * (output.log_probs[at] * number).sum(), {"calls": calls}


def plain(output, batch):
    at = batch.loss_positions
    return -(output.log_probs[at] * batch.fields["advantages"][at]).sum(), {}


@with_columns("ref_log_probs")
def referred(output, batch):
    at = batch.loss_positions
    return (output.log_probs[at] - batch.fields["ref_log_probs"][at]).square().sum(), {}


@with_columns("rewardz")
def misspelt(output, batch):
    return None


async def late(output, batch):
    return None


def short(output):
    return None


def per_token(output, batch):
    return output.log_probs, {}


def nothing(output, batch):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user, from outside of the repository."""
    name = f"own_losses_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_class_of_ones_own_has_settings_and_asks_for_columns(own: str, tmp_path: Path) -> None:
    algorithm = Algorithm.load(AlgorithmConfig(loss=f"{own}:Scaled", loss_config={"scale": 3.0}))
    assert algorithm.loss.columns == ("rewards", "reward/format")
    assert algorithm.loss.path == str(tmp_path / f"{own}.py")
    assert not algorithm.needs_reference
    fields = {"rewards": np.full(3, 1.0, np.float32), "reward/format": np.full(3, 0.5, np.float32)}
    batch = PackedBatch.from_sequences([Sequence(np.arange(3), np.array([False, True, True]), fields)])
    log_probs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    for calls in (1, 2):  # one object in a process
        loss, metrics = algorithm.loss(TokenOutput(log_probs), batch)
        assert loss.item() == pytest.approx(3.0 * 1.5 * 3.0)
        assert metrics == {"calls": torch.tensor(float(calls))}
    assert Algorithm.load(AlgorithmConfig(loss=f"{own}:Scaled")).config.loss_config == {"scale": 2.0}


def test_a_function_reads_the_advantages_by_default(own: str) -> None:
    assert loss_of(loss=f"{own}:plain").columns == ("advantages", "old_log_probs")
    referred = Algorithm.load(AlgorithmConfig(loss=f"{own}.referred"))
    assert (referred.loss.columns, referred.needs_reference) == (("ref_log_probs",), True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": ":misspelt"}, r"algorithm\.loss=.*: asks for the column 'rewardz'; there are advantages, rewards, "),
        ({"loss": ":late"}, r"cannot be called, or is async; expected \(output, batch\)"),
        ({"loss": ":short"}, r"takes \(output\) \(too many positional arguments\); expected \(output, batch\)"),
        ({"loss": ":missing"}, r"has no loss 'missing'"),
        ({"loss": ":plain", "loss_config": {"a": 1}}, r"loss_config=\{'a': 1\}: algorithm\.loss=.* takes no settings"),
        ({"loss": ":Scaled", "loss_config": {"scale": "x"}}, r"algorithm\.loss_config\.scale='x': must be a valid num"),
        ({"advantage": ":plain"}, r"algorithm\.advantage=.*takes \(output, batch\).*expected \(group\)"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(own: str, settings: dict[str, Any], message: str) -> None:
    named = {key: own + value if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        Algorithm.load(AlgorithmConfig.model_validate(named))


@pytest.mark.parametrize(
    ("name", "message"), [("per_token", r"gave a loss of shape \[1\]; expected a scalar"), ("nothing", "a NoneType")]
)
def test_a_loss_that_is_no_sum_is_named(own: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_of(loss=f"{own}:{name}")(TokenOutput(torch.zeros(1)), PackedBatch.from_sequences([]))
