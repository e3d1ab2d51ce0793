"""Megatron's optimizer, built as the config says, and torch's inside it."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer

from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.update.slices import Slice


def wrap_chunks(config: MegatronConfig, model: MegatronModel) -> None:
    """Wrap the chunks in Megatron's DistributedDataParallel, which keeps float32 gradients; in place."""
    model.chunks[:] = [
        DistributedDataParallel(
            config=model.transformer,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=config.overlap_grad_reduce,
                overlap_param_gather=config.overlap_param_gather,
                use_distributed_optimizer=config.distributed_optimizer,
                check_for_nan_in_grad=False,  # Megatron would end the process; a step is skipped instead
            ),
            module=chunk,
            # As Megatron's own training: only the first chunk's reduction overlaps with something in parts.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(model.chunks)
    ]


def build_optimizer(config: MegatronConfig, chunks: Sequence[Any]) -> ChainedOptimizer:
    """Build Megatron's AdamW over wrapped chunks. Collectives: an all-gather of small objects."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        decoupled_weight_decay=True,
        clip_grad=config.max_grad_norm,
        bf16=config.param_dtype == "bfloat16",
        fp16=config.param_dtype == "float16",
        params_dtype=getattr(torch, config.param_dtype),
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    # Else parts of float32 parameters would be results of autograd, whose gradients torch warns about.
    with torch.no_grad():
        optimizer = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False)
    for link in optimizer.chained_optimizers:
        # Each link has a loss scaler of its own, and experts would be unscaled by another scale than was used.
        link.grad_scaler = None
    return optimizer


def set_weight_decay(slices: Sequence[Slice], config: MegatronConfig) -> None:
    """Set each group's weight decay, which Megatron leaves to its own scheduler; its groups keep vectors apart."""
    decayed = {id(each.held) for each in slices if each.parameter.ndim > 1 or config.decay_vectors}
    for inner in inner_optimizers(slices):
        for group in inner.param_groups:
            is_decayed = any(id(held) in decayed for held in group["params"])
            group["weight_decay"] = config.weight_decay if is_decayed else 0.0


def inner_optimizers(slices: Sequence[Slice]) -> list[torch.optim.Optimizer]:
    """List torch's optimizers that have something to step."""
    return list({id(each.inner): each.inner for each in slices}.values())


def fill_state(slices: Sequence[Slice], num_updates: int) -> None:
    """Complete the optimizers' state, and set the number of updates they count.

    A state that is not there yet, before the first step, becomes all zero, which it would begin with anyway.
    """
    for each in slices:
        state = each.inner.state[each.held]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(each.held, dtype=torch.float32)
        if _counts_each(each.inner):
            if "step" not in state:
                is_on_device = each.inner.defaults.get("fused") or each.inner.defaults.get("capturable")
                device = each.held.device if is_on_device else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["step"].fill_(num_updates)
    for inner in inner_optimizers(slices):
        if not _counts_each(inner):
            for group in inner.param_groups:
                group["step"] = num_updates


def _counts_each(inner: torch.optim.Optimizer) -> bool:
    """Whether each parameter has a count of its own, as with torch; with Apex and Transformer Engine a group has."""
    return isinstance(inner, torch.optim.Adam)  # AdamW is one
