"""Log-probs and entropy from logits whose vocabulary is split over ranks. Imports no Megatron.

With z = logits / temperature, p = softmax(z), H its entropy, and y a target:

    log p_y = z_y - log sum exp z       d log p_y / d z_v = [v = y] - p_v
    H = log sum exp z - sum p z         d H / d z_v       = -p_v * (log p_v + H)

Only the highest z and the sums over the vocabulary need the other ranks, so the backward needs none of them. Both go
through the rows a block at a time: besides the logits themselves only one block exists in float32, and the backward
writes the gradient over the logits. Where those are float32 and have a gradient, the forward writes exp z over them
already, which saves a second pass of exponentials; only a gradient of the entropy needs z itself again.

Shape legend: M rows, m of them in a block, N targets of each, v entries of the vocabulary on this rank, k ids to find.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from verl_engine.engine.linear_log_probs import Entropy
from verl_engine.engine.temperature import Temperature, column, divide_, rows_of
from verl_engine.engine.top_k import ids_of_keys, top_keys

_BLOCK_ELEMENTS: Final = 1 << 24
"""Entries of a block: 64 MiB in float32."""


def split_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: Temperature,
    entropy: Entropy,
    *,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute each target's log-prob under softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits: [M, v], any float dtype: those of this rank's part of the vocabulary, v may be 0. They are overwritten,
            by the forward or the backward.
        targets: [M] int64, or [M, N], counted over the whole vocabulary.
        temperature: above 0; a number, or [M] float32, one for each row.
        entropy: ``off``, ``value`` (no gradient) or ``gradient``.
        first: index in the whole vocabulary of this rank's first entry.
        group: the ranks that split the vocabulary; None where nobody does.
        top_k: so many of the last targets are found here, and written into `targets`: the ids of the highest logits, in
            descending order, of equal ones the lowest first. At most as many as all ranks have.
    Returns:
        Log-probs in the shape of the targets, and entropy [M] (None where it is off), in nats, the same on every rank
        of the group; float32, or float64 where the logits are.
    Collectives: two all-reduces over the group, of the highest logit of each row and of its sums; before them, to find
        ids, an all-gather of `top_k` keys a row; none backward. Gradient: through the logits, each rank's part of it.
    """
    targets_MN = targets if targets.ndim > 1 else targets[:, None]
    if top_k:
        targets_MN[:, -top_k:] = _top_ids(logits, top_k, first, group)
    logp_MN, entropy_M = _SplitLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets_MN - first, temperature, entropy, group
    )
    return logp_MN.view_as(targets), (None if entropy == "off" else entropy_M)


def _top_ids(logits: torch.Tensor, top_k: int, first: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return [M, k] int64: the highest of the whole vocabulary are among the highest of each part."""
    num_own = min(top_k, logits.shape[1])
    keys_Mk = torch.cat([top_keys(logits[rows], num_own, first) for rows in _blocks(logits)])
    if group is not None:
        lowest = torch.iinfo(torch.int64).min
        own_Mk = torch.nn.functional.pad(keys_Mk, (0, top_k - num_own), value=lowest)
        parts = [torch.empty_like(own_Mk) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own_Mk, group=group)
        keys_Mk = torch.cat(parts, dim=1).topk(top_k, dim=1).values
    return ids_of_keys(keys_Mk)


class _SplitLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: Temperature,
        entropy: Entropy,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        highest_M = _highest(logits, temperature, group)
        # The sums of exp z, of exp z * z, and the targets' z, where z is counted from the highest.
        sums_FM = highest_M.new_zeros(2 + targets.shape[1], logits.shape[0])
        is_here_MN = (targets >= 0) & (targets < logits.shape[1])
        place_MN = targets.clamp(0, max(logits.shape[1] - 1, 0))  # of those that are not here, any
        ctx.holds_exp = ctx.needs_input_grad[0] and entropy == "off" and logits.dtype == highest_M.dtype
        for rows in _blocks(logits):
            block = logits.detach()[rows]
            z_mv = block if ctx.holds_exp else block.to(highest_M.dtype, copy=True)
            divide_(z_mv, rows_of(temperature, rows)).sub_(highest_M[rows, None])
            if logits.shape[1]:
                sums_FM[2:, rows] = torch.where(is_here_MN[rows], z_mv.gather(1, place_MN[rows]), 0.0).T
            if entropy == "off":
                sums_FM[0, rows] = z_mv.exp_().sum(1)
            else:
                exp_mv = z_mv.exp()
                sums_FM[0, rows] = exp_mv.sum(1)
                sums_FM[1, rows] = exp_mv.mul_(z_mv).sum(1)
        if group is not None:
            dist.all_reduce(sums_FM, group=group)
        log_sum_M = sums_FM[0].log()
        logp_MN = (sums_FM[2:] - log_sum_M).T.contiguous()
        entropy_M = log_sum_M - sums_FM[1] / sums_FM[0]
        ctx.save_for_backward(logits, is_here_MN, place_MN, highest_M, log_sum_M, entropy_M)
        ctx.temperature, ctx.entropy = temperature, entropy
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropy_M)
        return logp_MN, entropy_M

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, is_here_MN, place_MN, highest_M, log_sum_M, entropy_M = ctx.saved_tensors
        # z is divided by the temperature, so what comes back to the logits is too.
        d_logp_MN, d_entropy_M = gradients[0] / column(ctx.temperature), gradients[1] / ctx.temperature
        d_logp_M = d_logp_MN.sum(1)
        found = logits.detach()
        for rows in _blocks(found):
            if ctx.holds_exp:
                found[rows].mul_((-d_logp_M[rows] * log_sum_M[rows].neg().exp())[:, None])
                _add_own(found[rows], is_here_MN[rows], place_MN[rows], d_logp_MN[rows])
                continue
            z_mv = divide_(found[rows].to(highest_M.dtype, copy=True), rows_of(ctx.temperature, rows))
            logp_mv = z_mv.sub_(highest_M[rows, None]).sub_(log_sum_M[rows, None])
            if ctx.entropy == "gradient":
                factor_mv = logp_mv.add(entropy_M[rows, None]).mul_(-d_entropy_M[rows, None])
                d_mv = logp_mv.exp_().mul_(factor_mv.sub_(d_logp_M[rows, None]))
            else:
                d_mv = logp_mv.exp_().mul_(-d_logp_M[rows, None])
            _add_own(d_mv, is_here_MN[rows], place_MN[rows], d_logp_MN[rows])
            found[rows] = d_mv
        return found, None, None, None, None


def _add_own(d_mv: torch.Tensor, is_here_mN: torch.Tensor, place_mN: torch.Tensor, d_logp_mN: torch.Tensor) -> None:
    """Add to a gradient, in place, what comes from the targets themselves."""
    if d_mv.shape[1]:
        d_mv.scatter_add_(1, place_mN, torch.where(is_here_mN, d_logp_mN, 0.0))


def _highest(logits: torch.Tensor, temperature: Temperature, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return [M]: the highest logit of each row of the whole vocabulary, divided by the temperature."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if logits.shape[1]:
        highest_M = logits.amax(1).to(dtype).div_(temperature)
    else:
        highest_M = logits.new_full((logits.shape[0],), float("-inf"), dtype=dtype)
    if group is not None:
        dist.all_reduce(highest_M, op=dist.ReduceOp.MAX, group=group)
    return highest_M


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(logits.shape[1], 1))
    return (slice(first, first + size) for first in range(0, logits.shape[0], size))
