"""From scored groups to what the trainer computes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_async.algorithms.advantages import SampleGroup
from verl_async.algorithms.columns import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    REWARD_METRIC,
    REWARDS,
    ROLLOUT_LOG_PROBS,
)
from verl_async.algorithms.kl import kl_estimate
from verl_async.errors import RewardError
from verl_async.orchestrator.routed_experts import experts_of_trajectory
from verl_engine.batch.plan import plan_micro_batches
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.routed_experts import FIELD as ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    from torch import Tensor

    from verl_async.algorithms.algorithm import Algorithm
    from verl_async.algorithms.kl import KlEstimator
    from verl_async.orchestrator.actors import RankBatches
    from verl_async.orchestrator.samples import ScoredGroup


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which data-parallel rank computes each sequence, and in which micro-batch."""

    indices: list[list[list[int]]]

    @classmethod
    def of(cls, sequences: list[Sequence], data_parallel_size: int, max_tokens: int) -> BatchPlan:
        """Balance sequences over data-parallel ranks and micro-batches; see `plan_micro_batches`."""
        return cls(plan_micro_batches([len(sequence) for sequence in sequences], data_parallel_size, max_tokens))

    def pick(self, sequences: list[Sequence]) -> RankBatches:
        """Lay the sequences out as planned."""
        return [[[sequences[index] for index in group] for group in rank] for rank in self.indices]

    def restore(self, results: list[list[list[npt.NDArray[np.float32]]]]) -> list[npt.NDArray[np.float32]]:
        """Bring results in the plan's shape back into the order of the sequences."""
        flat = {
            index: value
            for rank, rank_values in zip(self.indices, results, strict=True)
            for group, values in zip(rank, rank_values, strict=True)
            for index, value in zip(group, values, strict=True)
        }
        return [flat[index] for index in range(len(flat))]


def build_sequences(
    groups: list[ScoredGroup], columns: Iterable[str], old_log_probs: str, *, with_experts: bool = False
) -> list[Sequence]:
    """Make the training sequences of a mini-batch: prompt and response, what the model drew of it in the loss.

    Args:
        groups: those with too few samples to compare are left out.
        columns: which per-token fields to add, of those that need no model; [L] float32, 0 outside of the loss.
            Others are passed over.
        old_log_probs: as ``algorithm.old_log_probs``; for ``rollout`` the old log-probs are the rollout's.
        with_experts: whether to add the experts that the rollout's tokens went through.
    Returns:
        One sequence a sample, group after group.
    Raises:
        RewardError: a column is a number that a sample's reward did not return.
        WorkflowError: see `experts_of_trajectory`.
    """
    names = tuple(columns)
    return [
        _build_sequence(group, index, names, old_log_probs, with_experts=with_experts)
        for group in groups
        if not group.is_dropped
        for index in range(len(group.trajectories))
    ]


def with_column(sequences: list[Sequence], name: str, values: Iterable[npt.NDArray[np.float32]]) -> list[Sequence]:
    """Add a field, each [L] float32."""
    return [
        dataclasses.replace(sequence, fields={**sequence.fields, name: column})
        for sequence, column in zip(sequences, values, strict=True)
    ]


def with_advantages(groups: list[ScoredGroup], sequences: list[Sequence], algorithm: Algorithm) -> list[Sequence]:
    """Add the advantages.

    Args:
        groups: of the mini-batch.
        sequences: of `build_sequences`, with the columns that the advantage reads.
        algorithm: the job's.
    Returns:
        The sequences with an advantage; groups where all are zero are left out if so configured.
    Raises:
        ConfigError: the advantage gave other shapes than it should, or numbers that are not finite.
    """
    learned: list[Sequence] = []
    rest = iter(sequences)
    for group in groups:
        if group.is_dropped:
            continue
        own = list(islice(rest, len(group.trajectories)))
        advantages = _advantages(group, own, algorithm)
        if algorithm.config.drop_uniform_groups and not any(column.any() for column in advantages):
            continue
        learned += with_column(own, ADVANTAGES, advantages)
    return learned


def without_fields(sequences: list[Sequence], names: frozenset[str]) -> list[Sequence]:
    """Leave out fields that nothing reads any more: they would travel to the ranks."""
    return [
        dataclasses.replace(one, fields={name: column for name, column in one.fields.items() if name not in names})
        for one in sequences
    ]


def kl_of(sequence: Sequence, estimator: KlEstimator) -> Tensor:
    """Return [R] float64, nats: the KL between old policy and reference, per token in the loss."""
    old_R, ref_R = (_in_loss(sequence, name) for name in (OLD_LOG_PROBS, REF_LOG_PROBS))
    return kl_estimate(old_R, ref_R, estimator)


def _in_loss(sequence: Sequence, name: str) -> Tensor:
    return torch.from_numpy(sequence.fields[name][sequence.loss_mask]).double()


def _advantages(group: ScoredGroup, sequences: list[Sequence], algorithm: Algorithm) -> list[npt.NDArray[np.float32]]:
    """Return [L] for each sample of a group."""
    rewards_G = torch.tensor(group.rewards, dtype=torch.float64)  # squares need room
    if algorithm.reward_kl is not None:
        kl_G = torch.stack([kl_of(one, algorithm.reward_kl.estimator).sum() for one in sequences])
        rewards_G = rewards_G - algorithm.reward_kl.coefficient * kl_G
    columns = {name: [_in_loss(one, name) for one in sequences] for name in algorithm.advantage_columns}
    place = f"algorithm.advantage={algorithm.config.advantage}"
    given = algorithm.advantage(SampleGroup(rewards_G, columns))
    try:
        found = [torch.as_tensor(value).detach() for value in given]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place} gave {given!r}; expected a number, or a tensor, for each sample") from error
    if len(found) != len(sequences):
        raise ConfigError(f"{place} gave {len(found)} advantages for a group of {len(sequences)} samples")
    return [_advantage_column(*pair, place) for pair in zip(sequences, found, strict=True)]


def _advantage_column(sequence: Sequence, found: Tensor, place: str) -> npt.NDArray[np.float32]:
    if list(found.shape) not in ([], [sequence.num_loss_tokens]):
        raise ConfigError(
            f"{place} gave a sample of {sequence.num_loss_tokens} tokens advantages of shape {list(found.shape)}; "
            "expected one number, or one for each token"
        )
    if not found.float().isfinite().all():
        raise ConfigError(f"{place} gave {found.flatten()[:3].tolist()}, which is not finite in float32")
    column = np.zeros(len(sequence), np.float32)
    column[sequence.loss_mask] = found.numpy()
    return column


def _build_sequence(
    group: ScoredGroup, index: int, names: tuple[str, ...], old_log_probs: str, *, with_experts: bool
) -> Sequence:
    prompt_ids, trajectory = group.instance.encoded.token_ids, group.trajectories[index]
    in_loss = np.array([*[False] * len(prompt_ids), *trajectory.in_loss])

    def column(values: float | list[float]) -> npt.NDArray[np.float32]:
        filled = np.zeros(len(in_loss), np.float32)
        filled[in_loss] = values
        return filled

    rollout_log_probs = column(trajectory.log_probs)
    fields: dict[str, npt.NDArray[Any]] = {ROLLOUT_LOG_PROBS: rollout_log_probs}
    if old_log_probs == "rollout":
        fields[OLD_LOG_PROBS] = rollout_log_probs
    if REWARDS in names:
        fields[REWARDS] = column(group.rewards[index])
    for name in names:
        if name.startswith(REWARD_METRIC):
            fields[name] = column(_reward_metric(group, index, name))
    if with_experts:
        fields[ROUTED_EXPERTS] = experts_of_trajectory(len(prompt_ids), trajectory, group.instance.sample_id(index))
    return Sequence(np.array([*prompt_ids, *trajectory.token_ids], np.int64), in_loss, fields)


def _reward_metric(group: ScoredGroup, index: int, name: str) -> float:
    metrics = group.metrics[index] if group.metrics else {}
    key = name.removeprefix(REWARD_METRIC)
    if key not in metrics:
        known = ", ".join(metrics) or "no other numbers"
        raise RewardError(
            f"sample {group.instance.sample_id(index)}: the algorithm asks for {name}, but the reward returned no "
            f"{key!r}; beside the score it returned {known}"
        )
    return metrics[key]
