"""Weights and optimizer state as DTensors under Hugging Face names, as fsdp2 has them: either loads the other's.

FSDP1 cuts flat tensors anywhere, DTensors are cut between rows; so each unit is gathered and cut again. Not by FSDP1's
own state dicts: they know no DTensors on a single rank, and nothing of parameters whose piece on a rank is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.checkpoints.module import fill_state
from verl_fsdp.fsdp1.flat_unit import FlatMember, FlatUnit

if TYPE_CHECKING:
    from verl_fsdp.fsdp1.weights import FlatWeights

_OF_THIS_MACHINE: Final = ("params", "foreach", "fused", "capturable")
"""Of a group's settings, those that follow from where the optimizer runs, not from what was trained."""
Entries = dict[str, dict[str, Any]]
"""Optimizer state: by parameter's name, by the optimizer's key."""


def model_state(weights: FlatWeights, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return all parameters, and live persistent buffers. Collectives: one all-gather per unit."""
    found: dict[str, torch.Tensor] = {}
    for unit in weights.units:
        flat = unit.gather()
        found |= {member.name: _rows(unit, member, flat, mesh) for member in unit.members}
    return {name: found[name] for name in weights.table.parameters} | {
        name: buffer.detach() for name, buffer in weights.buffers.items()
    }


def load_model_state(weights: FlatWeights, state: Mapping[str, torch.Tensor]) -> None:
    """Take what `model_state` returns, with other values, in place. Collectives: an all-gather per sharded tensor."""
    for name, (unit, member) in weights.places.items():
        begin, end = unit.span(member)
        unit.piece(member).copy_(_whole(state[name]).reshape(-1)[begin:end])
    for name, buffer in weights.buffers.items():
        buffer.detach().copy_(_whole(state[name]))


def optimizer_state(weights: FlatWeights, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the state of all trained parameters, and the groups' settings, with names in place of parameters.

    Of an optimizer that has not stepped yet it comes all zero, as a place to load one into. UnsupportedError where it
    keeps something else than single numbers and one number for each entry.
    Collectives: an all-gather of small objects, and one all-gather per unit and key.
    """
    is_fresh = not optimizer.state  # so is that of a rank whose pieces are all empty
    if is_fresh:
        fill_state(optimizer)
    keys = _agreed(_kinds(weights, optimizer), weights.units[0])
    state: Entries = {name: {} for name in weights.table.parameters if name in keys}
    for unit in weights.units:
        unit_keys = {key for member in unit.members for key in keys.get(member.name, {})}
        for key in sorted(unit_keys):
            _collect(unit, key, keys, optimizer, state, mesh)
    if is_fresh:
        optimizer.state.clear()
    names = _names(weights)
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(weights: FlatWeights, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take what `optimizer_state` returns, with other values. Collectives: an all-gather per sharded tensor."""
    names = _names(weights)
    groups = {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, values in state["state"].items():
        unit, member = weights.places[name]
        begin, end = unit.span(member)
        found: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                # Memory of its own, shaped as the optimizer's parameter is.
                part = _whole(value).reshape(-1)[begin:end].clone()
                found[key] = part.view(member.parameter.shape).to(member.parameter.device)
            elif isinstance(value, torch.Tensor):
                # Counts of steps: some forms of an optimizer want them on the device, the others on the CPU.
                is_on_device = groups[name].get("fused") or groups[name].get("capturable")
                found[key] = value.to(member.parameter.device if is_on_device else "cpu", copy=True)
            else:
                found[key] = value
        if end > begin:  # of an empty piece the optimizer never sees a gradient
            optimizer.state[member.parameter].update(found)
    given = {name: group for group in state["param_groups"] for name in group["params"]}
    for group in optimizer.param_groups:
        settings = given.get(names[id(group["params"][0])], {}) if group["params"] else {}
        group.update({key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE})


def _collect(
    unit: FlatUnit,
    key: str,
    keys: Mapping[str, Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    state: Entries,
    mesh: DeviceMesh,
) -> None:
    kinds = {member.name: keys[member.name][key] for member in unit.members if key in keys.get(member.name, {})}
    dtypes = {kind for kind in kinds.values() if isinstance(kind, torch.dtype)}
    for dtype in sorted(dtypes, key=str):
        local = torch.zeros_like(unit.local, dtype=dtype)
        for member in unit.members:
            value = optimizer.state.get(member.parameter, {}).get(key)
            if kinds.get(member.name) is dtype and value is not None:
                unit.piece(member, local).copy_(value.reshape(-1))
        flat = unit.gather(local)
        for member in unit.members:
            if kinds.get(member.name) is dtype:
                state[member.name][key] = _rows(unit, member, flat, mesh)
    for name, kind in kinds.items():
        if not isinstance(kind, torch.dtype):
            state[name][key] = kind


def _kinds(weights: FlatWeights, optimizer: torch.optim.Optimizer) -> Entries:
    """Say of each key whether it has one number for each entry (then its dtype), or else its value."""
    kinds: Entries = {}
    for name, (unit, member) in weights.places.items():
        own = optimizer.state.get(member.parameter)
        if own is None:
            continue
        begin, end = unit.span(member)
        for key, value in own.items():
            is_sharded = isinstance(value, torch.Tensor) and value.ndim > 0
            if is_sharded and value.numel() != end - begin:
                raise UnsupportedError(
                    f"engine.optimizer: {type(optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for "
                    f"{name}, of which this rank has {end - begin} entries; backend fsdp cannot divide that"
                )
            kept = value.cpu() if isinstance(value, torch.Tensor) else value
            kinds.setdefault(name, {})[key] = value.dtype if is_sharded else kept
    return kinds


def _agreed(own: Entries, unit: FlatUnit) -> Entries:
    """Put together what the ranks of a copy know, none of which has a piece of every parameter.

    A rank with an empty piece never steps it, so of single numbers, such as counts of steps, the largest is right.
    """
    if unit.num_ranks == 1:
        return own
    found: list[Entries] = [{} for _ in range(unit.num_ranks)]
    dist.all_gather_object(found, own, group=unit.handle.process_group)
    agreed: Entries = {}
    for entries in found:
        for name, kinds in entries.items():
            known = agreed.setdefault(name, {})
            for key, kind in kinds.items():
                is_number = isinstance(kind, torch.Tensor | float | int) and key in known
                known[key] = max(known[key], kind) if is_number else kind
    return agreed


def _rows(unit: FlatUnit, member: FlatMember, flat: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Cut this rank's rows out of a gathered member, as a DTensor on the mesh of the weights."""
    whole = unit.whole(member, flat)
    axis = mesh.ndim - 1
    shards = whole.chunk(mesh.size(axis))
    rank = mesh.get_local_rank(axis)
    rows = shards[rank] if rank < len(shards) else whole[:0]
    return DTensor.from_local(
        rows if unit.num_ranks == 1 else rows.clone(),  # or the whole unit would stay alive with it
        mesh,
        [*[Replicate()] * axis, Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _whole(value: torch.Tensor) -> torch.Tensor:
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _names(weights: FlatWeights) -> dict[int, str]:
    return {id(member.parameter): name for name, (_, member) in weights.places.items()}
