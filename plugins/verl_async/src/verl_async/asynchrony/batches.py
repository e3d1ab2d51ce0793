"""From scored groups to what the trainer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_async.algorithms.advantages import grpo_advantages, uniform_groups
from verl_engine.batch.plan import plan_micro_batches
from verl_engine.batch.sequence import Sequence

if TYPE_CHECKING:
    import numpy.typing as npt

    from verl_async.asynchrony.actors import ShareBatches
    from verl_async.asynchrony.samples import ScoredGroup
    from verl_async.config import AlgorithmConfig
    from verl_async.rollout.interface import Generation


@dataclass(frozen=True, slots=True)
class SharePlan:
    """Which share of the data each sequence is in, and in which micro-batch."""

    indices: list[list[list[int]]]

    @classmethod
    def of(cls, sequences: list[Sequence], num_shares: int, max_tokens: int) -> SharePlan:
        """Balance sequences over shares and micro-batches; see `plan_micro_batches`."""
        return cls(plan_micro_batches([len(sequence) for sequence in sequences], num_shares, max_tokens))

    def pick(self, sequences: list[Sequence]) -> ShareBatches:
        """Lay the sequences out as planned."""
        return [[[sequences[index] for index in group] for group in share] for share in self.indices]

    def restore(self, results: list[list[list[npt.NDArray[np.float32]]]]) -> list[npt.NDArray[np.float32]]:
        """Bring results in the plan's shape back into the order of the sequences."""
        flat = {
            index: value
            for share, share_values in zip(self.indices, results, strict=True)
            for group, values in zip(share, share_values, strict=True)
            for index, value in zip(group, values, strict=True)
        }
        return [flat[index] for index in range(len(flat))]


def build_sequences(groups: list[ScoredGroup], config: AlgorithmConfig) -> list[Sequence]:
    """Make the training sequences of a mini-batch: prompt and response, the response in the loss.

    Fields: ``advantages`` (the group-relative advantage, the same for each token of a response) and
    ``rollout_log_probs``.

    Returns:
        One sequence a sample, group after group; groups with fewer than two scored samples are left out, and those
        with equal rewards if so configured.
    """
    return [
        _build_sequence(group.draw.encoded.token_ids, generation, advantage)
        for group in groups
        for generation, advantage in zip(group.generations, _advantages(group, config), strict=False)
    ]


def _advantages(group: ScoredGroup, config: AlgorithmConfig) -> list[float]:
    """Return each sample's advantage; none where the group is left out."""
    if group.is_dropped:
        return []
    rewards_1G = torch.tensor([group.rewards], dtype=torch.float64)  # squares need room
    if config.drop_uniform_groups and uniform_groups(rewards_1G).item():
        return []
    advantages: list[float] = grpo_advantages(rewards_1G, normalize_by_std=config.normalize_by_std)[0].tolist()
    return advantages


def with_old_log_probs(sequences: list[Sequence], log_probs: list[npt.NDArray[np.float32]]) -> list[Sequence]:
    """Add the field ``old_log_probs``, each [L] float32, nats."""
    return [
        Sequence(sequence.token_ids, sequence.loss_mask, {**sequence.fields, "old_log_probs": old})
        for sequence, old in zip(sequences, log_probs, strict=True)
    ]


def _build_sequence(prompt_ids: tuple[int, ...], generation: Generation, advantage: float) -> Sequence:
    num_prompt, num_response = len(prompt_ids), len(generation.token_ids)
    in_response = np.arange(num_prompt + num_response) >= num_prompt
    rollout_log_probs = np.zeros(len(in_response), np.float32)
    rollout_log_probs[num_prompt:] = generation.log_probs
    return Sequence(
        token_ids=np.array([*prompt_ids, *generation.token_ids], np.int64),
        loss_mask=in_response,
        fields={
            "advantages": np.where(in_response, advantage, 0.0).astype(np.float32),
            "rollout_log_probs": rollout_log_probs,
        },
    )
