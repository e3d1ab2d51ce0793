"""Which experts tokens go through: given with the sequences, or said of a forward.

Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers" (rollout
routing replay).

Shape legend: T tokens of a micro-batch, t those that a rank runs, with filling; layers with experts; k experts a token.
"""

from typing import Final

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import BatchError

FIELD: Final = "routed_experts"
"""The field of a sequence; see `Sequence`."""


def given_experts(batch: PackedBatch, num_layers: int, num_experts: int) -> torch.Tensor | None:
    """Return [T, layers, k] int64, -1 where the router chooses; None where the sequences bring none.

    Args:
        batch: the micro-batch.
        num_layers: of the model that have experts.
        num_experts: of a layer.
    Raises:
        BatchError: what the sequences bring fits no such model. To see it, the host waits for the device once.
    """
    found = batch.fields.get(FIELD)
    if found is None:
        return None
    if found.ndim != 3 or found.shape[1] != num_layers or found.is_floating_point():  # noqa: PLR2004
        raise BatchError(
            f"{FIELD} is {found.dtype} of {list(found.shape[1:])} per token; it must be whole numbers of [layers with "
            f"experts, experts per token], and the model has {num_layers} such layers"
        )
    ordered = found.long().sort(-1).values
    is_own, is_twice = ordered[..., -1] == -1, (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    is_right = is_own & (ordered[..., 0] == -1) | (ordered[..., 0] >= 0) & (ordered[..., -1] < num_experts) & ~is_twice
    if not bool(is_right.all()):
        raise BatchError(
            f"{FIELD} must name different experts for each token and layer, from 0 to {num_experts - 1}, or be -1 "
            "throughout where the router is to choose"
        )
    return found.long()


def experts_of(experts: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Pick the tokens that a rank runs, [t, layers, k], from [T, layers, k]; the router chooses for filling.

    `source`, [t] int64, has their indices among the T, -1 for filling.
    """
    return experts[source.clamp_min(0)].masked_fill((source < 0)[:, None, None], -1)


def put_back(experts: torch.Tensor, source: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Undo `experts_of`: return [T, layers, k], 0 for tokens that this rank does not run."""
    whole = experts.new_zeros(num_tokens + 1, *experts.shape[1:])
    return whole.index_put((source.where(source >= 0, num_tokens),), experts)[:num_tokens]


def choose(scores: torch.Tensor, own: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace what a router chose in one layer; a BatchError where the numbers of experts or tokens differ.

    Args:
        scores: [t, experts]: what it chose by.
        own: [t, k] int64: its choice.
        given: [t, k] int64; -1 where its choice stays.
    Returns:
        The scores of the experts, with gradient, and the experts, both [t, k].
    """
    if given.shape != own.shape:
        raise BatchError(
            f"{FIELD} has {given.shape[1]} experts for each of {given.shape[0]} tokens, and the model's routers choose "
            f"{own.shape[1]} for each of {own.shape[0]}"
        )
    experts = torch.where(given < 0, own, given)
    return scores.gather(1, experts), experts
