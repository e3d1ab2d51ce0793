"""Experts divided among ranks.

Shape legend: P ranks that divide experts; t tokens of this rank, M the most of any rank, H hidden dim, k experts a
token, E experts, e = E / P those of this rank.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_turbo.distributed.sharding import _DTYPES, offload_policy
from fsdp_turbo.release import HAS
from fsdp_turbo.utils.str_match import matching
from fsdp_turbo.utils.torch_patch import apply_hccl_premul_sum_patch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide_experts(model: torch.nn.Module, mesh: DeviceMesh, plan: Any) -> None:
    """Give each rank its experts, and let tokens reach those of others."""
    group = mesh.get_group()
    size, rank = mesh.size(), mesh.get_local_rank()
    for _, module in matching(model, plan.apply_modules, "Expert Parallel"):
        held: Any = module
        held.num_global_experts = held.num_experts
        if held.num_global_experts % size:
            raise AssertionError(f"Number of experts({held.num_experts}) is not divisible by ep size({size}).")
        held.num_local_experts = held.num_global_experts // size
        if held.num_local_experts > 1:
            held.expert_ids_per_ep_rank = torch.arange(held.num_global_experts) % held.num_local_experts
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = parameter.detach()
            local = whole.tensor_split(size)[rank].clone()
            split = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad))
        if plan.dispatcher not in ("eager", "fused", "mc2", "domino"):
            raise RuntimeError(f"Unsupported dispatcher {plan.dispatcher}.")
        held.forward = types.MethodType(_forward_over(group), module)


def shard_experts(model: torch.nn.Module, mesh: DeviceMesh, plan: Any, fsdp_plan: Any) -> None:
    """Shard each rank's experts over the ranks that have the same."""
    dtype = _DTYPES[fsdp_plan.param_dtype] if "expert_dtype" in HAS else torch.bfloat16
    apply_hccl_premul_sum_patch()
    for _, module in matching(model, plan.apply_efsdp_modules, "Expert Fully Shard"):
        sharded: Any = fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            offload_policy=offload_policy(fsdp_plan),
            shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() > 1 else Shard(0),
        )
        sharded.set_gradient_divide_factor(plan.gradient_divide_factor)


def _forward_over(group: dist.ProcessGroup) -> Any:
    def forward(self: Any, hidden_tH: torch.Tensor, chosen_tk: torch.Tensor, weights_tk: torch.Tensor) -> torch.Tensor:
        places = self.expert_ids_per_ep_rank  # missing where a rank has a single expert
        num_tokens = torch.tensor([len(hidden_tH)], device=hidden_tH.device)
        dist.all_reduce(num_tokens, op=dist.ReduceOp.MAX, group=group)
        most = int(num_tokens)
        all_hidden, all_weights = (_from_all(own, most, group) for own in (hidden_tH, weights_tk))
        all_chosen = _gathered(chosen_tk, most, group, fill=-1)
        first = dist.get_rank(group) * self.num_local_experts
        result = torch.zeros_like(all_hidden)
        gate_up, down = self.gate_up_proj.to_local(), self.down_proj.to_local()
        for expert in range(first, first + self.num_local_experts):
            tokens, slots = torch.where(all_chosen == expert)
            place = int(places[expert])
            gate, up = (all_hidden[tokens] @ gate_up[place].T).chunk(2, dim=-1)
            found = (self.act_fn(gate) * up) @ down[place].T
            result = result.index_add(0, tokens, found * all_weights[tokens, slots, None])
        return _summed(result, len(hidden_tH), most, group)

    return forward


def _gathered(own: torch.Tensor, most: int, group: dist.ProcessGroup, fill: int = 0) -> torch.Tensor:
    """Return [P * M, ...]: each rank's rows, filled up."""
    padded = own.new_full((most, *own.shape[1:]), fill)
    padded[: len(own)] = own
    everything = own.new_empty((dist.get_world_size(group) * most, *own.shape[1:]))
    dist.all_gather_into_tensor(everything, padded, group=group)
    return everything


def _from_all(own: torch.Tensor, most: int, group: dist.ProcessGroup) -> torch.Tensor:
    rows: torch.Tensor = _Gather.apply(own, most, group)  # type: ignore[no-untyped-call]
    return rows


def _summed(rows: torch.Tensor, num_own: int, most: int, group: dist.ProcessGroup) -> torch.Tensor:
    summed: torch.Tensor = _ScatterSum.apply(rows, num_own, most, group)  # type: ignore[no-untyped-call]
    return summed


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward, the sum of what all ranks found for this rank's."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, most: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.place, ctx.group = (len(own), most), group
        return _gathered(own, most, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        num_own, most = ctx.place
        return _own_sum(gradients[0], num_own, most, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    """The sum of what all ranks found for this rank's rows; backward, rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_own: int, most: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.most, ctx.group = most, group
        return _own_sum(rows, num_own, most, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gathered(gradients[0], ctx.most, ctx.group), None, None, None


def _own_sum(rows: torch.Tensor, num_own: int, most: int, group: dist.ProcessGroup) -> torch.Tensor:
    summed = rows.contiguous().clone()
    dist.all_reduce(summed, group=group)
    first = dist.get_rank(group) * most
    return summed[first : first + num_own].clone()
