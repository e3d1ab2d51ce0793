"""Log-probs and entropy straight from the last hidden states, never holding the logits of all tokens.

The output layer is linear, so the logits of some tokens, or of some of the vocabulary, are one product away. The
forward takes a chunk of tokens at a time with the whole vocabulary, and keeps two numbers per token: its highest logit,
and the log of the softmax's denominator. With them the backward needs no whole rows: it takes all tokens and a part of
the vocabulary at a time. So each part of the weight's gradient is one product over all tokens, rounded once, and what
is summed up over the parts is the small gradient of the hidden states, in float32. Where all tokens fit one chunk and
no entropy is asked for, what the forward made of the logits is kept, and nothing is computed again.

With z = (hidden @ weight.T + bias) / temperature, p = softmax(z), H its entropy, and y a target:

    log p_y = z_y - log sum exp z       d log p_y / d z_v = [v = y] - p_v
    H = log sum exp z - sum p z         d H / d z_v       = -p_v * (log p_v + H)

Shape legend: M tokens, C of them in a chunk, V vocabulary, v of it in a part, H hidden dim, N targets of each token.
"""

from typing import Any, Final, Literal, NamedTuple

import torch

from verl_engine.contract.choices import require_choice
from verl_engine.engine.temperature import Temperature, column, divide_, rows_of
from verl_engine.engine.top_k import fill_top_ids

Entropy = Literal["off", "value", "gradient"]
"""Whether entropy is computed: not at all, without gradient, or with one."""
_ALIGNMENT: Final = 64
"""Parts of the vocabulary are multiples of it: odd sizes slow matrix products down on accelerators."""


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: Temperature = 1.0,
    bias: torch.Tensor | None = None,
    *,
    chunk: int = 256,
    entropy: Entropy = "off",
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute each target's log-prob under softmax((hidden @ weight.T + bias) / temperature).

    Takes about ``chunk * V`` float32 of memory (twice that with entropy), besides the results and gradients,
    and one matrix product more than plain logits, unless all tokens fit one chunk: the backward computes them again.

    Args:
        hidden: [M, H], any float dtype; M may be 0.
        weight: [V, H], of the same dtype.
        targets: [M] int64, or [M, N].
        temperature: above 0; a number, or [M] float32, one for each token.
        bias: [V], of the same dtype.
        chunk: tokens whose logits exist at a time.
        entropy: ``off``, ``value`` (no gradient) or ``gradient``.
        top_k: so many of the last targets are found here, and written into `targets`; see `fill_top_ids`.
    Returns:
        Log-probs in the shape of the targets, and entropy [M] (None where it is off), in nats; float32, or float64
        where the input is.
    Raises:
        ConfigError: `entropy` is none of these.
    Collectives: none. Gradient: through hidden, weight and bias, whichever need one, each in its own dtype.
    """
    require_choice("entropy", entropy, Entropy)
    targets_MN = targets if targets.ndim > 1 else targets[:, None]
    options = _Options(chunk, entropy, top_k)
    logp_MN, entropy_M = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets_MN, temperature, bias, options
    )
    return logp_MN.view_as(targets), (None if entropy == "off" else entropy_M)


class _Options(NamedTuple):
    chunk: int
    entropy: Entropy
    top_k: int


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: Temperature,
        bias: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunk, entropy, top_k = options
        num_tokens = hidden.shape[0]
        logits = _Logits(min(chunk, num_tokens) * weight.shape[0], hidden, needs_spare=entropy != "off")
        highest_M, log_sum_M, entropy_M = (hidden.new_empty(num_tokens, dtype=logits.dtype) for _ in range(3))
        logp_MN = hidden.new_empty(targets.shape, dtype=logits.dtype)
        kept_MV = None  # exp(z less its highest), where that is the one chunk there is
        for start in range(0, num_tokens, chunk):
            own = slice(start, start + chunk)
            z_CV = logits.of(hidden[own], weight, bias)
            fill_top_ids(targets[own], z_CV, top_k)
            divide_(z_CV, rows_of(temperature, own))
            target_CN = z_CV.gather(1, targets[own])
            highest_C = z_CV.amax(1)
            mean_C = None
            if entropy == "off":
                sum_C = z_CV.sub_(highest_C[:, None]).exp_().sum(1)
                if num_tokens <= chunk and any(ctx.needs_input_grad):
                    kept_MV = z_CV
            else:
                p_CV = torch.exp(z_CV.sub_(highest_C[:, None]), out=logits.spare(z_CV))
                sum_C = p_CV.sum(1)
                mean_C = p_CV.mul_(z_CV).sum(1).div_(sum_C)  # of z less its highest
            log_sum_C = sum_C.log()
            highest_M[own], log_sum_M[own] = highest_C, log_sum_C
            # In this order: where logits are large, the sum of the last two would round the small one away.
            logp_MN[own] = target_CN - highest_C[:, None] - log_sum_C[:, None]
            if mean_C is not None:
                entropy_M[own] = log_sum_C - mean_C
        ctx.save_for_backward(hidden, weight, targets, bias, highest_M, log_sum_M, entropy_M, kept_MV)
        ctx.temperature, ctx.chunk, ctx.entropy = temperature, chunk, entropy
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropy_M)
        return logp_MN, entropy_M

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, bias, highest_M, log_sum_M, entropy_M, kept_MV = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = (ctx.needs_input_grad[index] for index in (0, 1, 4))
        # z is divided by the temperature, so what comes back to the logits is too.
        d_logp_MN, d_entropy_M = gradients[0] / column(ctx.temperature), gradients[1] / ctx.temperature
        d_logp_M = d_logp_MN.sum(1)
        num_tokens = hidden.shape[0]
        width = _part_width(weight.shape[0], num_tokens, ctx.chunk)
        has_entropy = ctx.entropy == "gradient"
        logits = _Logits(num_tokens * width, hidden, needs_spare=has_entropy)
        d_hidden = torch.zeros_like(hidden, dtype=logits.dtype) if needs_hidden else None
        empty_like = torch.empty_like if num_tokens else torch.zeros_like  # without tokens nothing is written below
        d_weight = empty_like(weight) if needs_weight else None
        d_bias = empty_like(bias) if needs_bias else None
        for first in range(0, weight.shape[0], width) if num_tokens else ():
            part = slice(first, min(first + width, weight.shape[0]))
            if kept_MV is not None:
                factor_M = -d_logp_M * torch.exp(-log_sum_M)
                d_Mv = torch.mul(kept_MV, factor_M[:, None], out=logits.room(kept_MV))
            else:
                z_Mv = logits.of(hidden, weight[part], None if bias is None else bias[part])
                z_Mv = divide_(z_Mv, ctx.temperature)
                logp_Mv = z_Mv.sub_(highest_M[:, None]).sub_(log_sum_M[:, None])
                if has_entropy:
                    factor_Mv = torch.mul(logp_Mv, -d_entropy_M[:, None], out=logits.spare(logp_Mv))
                    factor_Mv -= (d_logp_M + d_entropy_M * entropy_M)[:, None]
                    d_Mv = logp_Mv.exp_().mul_(factor_Mv)
                else:
                    d_Mv = logp_Mv.exp_().mul_(-d_logp_M[:, None])
            # Targets outside the part add 0 somewhere, since to find out which they are a device would have to wait.
            is_here_MN = (targets >= part.start) & (targets < part.stop)
            places_MN = (targets - part.start).clamp(0, d_Mv.shape[1] - 1)
            d_Mv.scatter_add_(1, places_MN, torch.where(is_here_MN, d_logp_MN, 0.0))
            if d_bias is not None:
                d_bias[part] = d_Mv.sum(0)
            narrow_Mv = logits.narrowed(d_Mv)
            if d_weight is not None:
                torch.mm(narrow_Mv.T, hidden, out=d_weight[part])
            if d_hidden is not None and narrow_Mv is d_Mv:
                d_hidden.addmm_(d_Mv, weight[part])
            elif d_hidden is not None:
                d_hidden += narrow_Mv @ weight[part]
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None, None, d_bias, None


class _Logits:
    """Room for some logits, used again and again: fresh memory costs as much time as the product."""

    def __init__(self, size: int, hidden: torch.Tensor, *, needs_spare: bool) -> None:
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._wide = hidden.new_empty(size, dtype=self.dtype)
        self._narrow = self._wide if hidden.dtype == self.dtype else hidden.new_empty(size)
        self._spare = torch.empty_like(self._wide) if needs_spare else self._wide[:0]

    def of(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return hidden @ weight.T + bias, overwriting what was returned before."""
        size = hidden.shape[0] * weight.shape[0]
        product = self._narrow[:size].view(hidden.shape[0], weight.shape[0])
        if bias is None:
            torch.mm(hidden, weight.T, out=product)
        else:
            torch.addmm(bias, hidden, weight.T, out=product)
        found = self._wide[:size].view_as(product)
        if found.dtype != product.dtype:
            found.copy_(product)
        return found

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return what `of` fills, in a shape."""
        return self._wide[: like.numel()].view_as(like)

    def spare(self, logits: torch.Tensor) -> torch.Tensor:
        """Return as much room again."""
        return self._spare[: logits.numel()].view_as(logits)

    def narrowed(self, wide: torch.Tensor) -> torch.Tensor:
        """Return what `of` returned, changed since, in the dtype of the product."""
        if self._narrow is self._wide:
            return wide
        return self._narrow[: wide.numel()].view_as(wide).copy_(wide)


def _part_width(vocabulary: int, num_tokens: int, chunk: int) -> int:
    """Return how much of the vocabulary takes, with all tokens, the memory of a chunk of tokens with all of it."""
    width = -(-vocabulary * chunk // max(num_tokens, 1))
    return min(vocabulary, -(-width // _ALIGNMENT) * _ALIGNMENT)
