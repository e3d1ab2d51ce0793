"""The state of an engine over one torch module, plain or sharded, for torch's distributed checkpoints."""

import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

_WRAPPERS: Final = re.compile(r"_(checkpoint_wrapped_module|fsdp_wrapped_module|orig_mod)\.")
"""What wrappers put into names; torch takes it out of those of parameters and persistent buffers."""

PART_OF: Final = "part_of"
"""Key in groups of an optimizer. Groups with the same number there are one, in parts that an engine must keep apart,
such as those sharded over different ranks: an engine that need not do so takes their state, and the other way round."""

_OF_THIS_MACHINE: Final = ("fused", "foreach", "capturable")
"""How an optimizer computes, which depends on the device: a run may go on on another kind."""


def module_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Collect the state, live; tied parameters come once, under their first name.

    That of an optimizer that never stepped comes all zero, as a place to load one into; it gets none itself.
    """
    state: dict[str, Any] = {"model": _without_ties(module, get_model_state_dict(module))}
    state["buffers"] = dict(_unsaved_buffers(module))
    if optimizer is not None:
        is_fresh = not optimizer.state
        if is_fresh:
            fill_state(optimizer)
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
        state["optimizer"]["param_groups"] = _together(state["optimizer"]["param_groups"])
        if is_fresh:
            optimizer.state.clear()
    return state


def load_module_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Take a state as `module_state` collects it; buffers that it lacks stay as they are."""
    lax = StateDictOptions(strict=False)  # tied names come once, parameters that were never trained have no state
    set_model_state_dict(module, state["model"], options=lax)
    buffers = dict(_unsaved_buffers(module))
    with torch.no_grad():
        for name, value in state.get("buffers", {}).items():
            buffers[name].copy_(value)
    if optimizer is not None:
        groups = _apart(module, optimizer, state["optimizer"]["param_groups"])
        for group in groups:
            group.update({key: value for key, value in optimizer.param_groups[0].items() if key in _OF_THIS_MACHINE})
        set_optimizer_state_dict(module, optimizer, state["optimizer"] | {"param_groups": groups}, options=lax)


def _together(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the groups that `PART_OF` says are one."""
    joined: list[dict[str, Any]] = []
    by_number: dict[int, dict[str, Any]] = {}
    for group in groups:
        whole = {key: value for key, value in group.items() if key != PART_OF} | {"params": list(group["params"])}
        number = group.get(PART_OF)
        if number in by_number:
            by_number[number]["params"] += group["params"]
            continue
        joined.append(whole)
        if number is not None:
            by_number[number] = whole
    return joined


def _apart(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Undo `_together`: give each part of a group what was saved for its parameters."""
    if not any(PART_OF in own for own in optimizer.param_groups):
        return groups
    names = {id(parameter): _WRAPPERS.sub("", name) for name, parameter in module.named_parameters()}
    saved = {name: group for group in groups for name in group["params"]}
    found = []
    for own in optimizer.param_groups:
        params = [names[id(parameter)] for parameter in own["params"]]
        mark = {PART_OF: own[PART_OF]} if PART_OF in own else {}
        found.append(saved[params[0]] | {"params": params} | mark)
    return found


def _without_ties(module: torch.nn.Module, model: dict[str, Any]) -> dict[str, Any]:
    """Leave out further names of parameters and buffers that are there already."""
    first: dict[int, str] = {}
    further = set()
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        plain = _WRAPPERS.sub("", name)
        if first.setdefault(id(tensor), plain) != plain:
            further.add(plain)
    return {name: tensor for name, tensor in model.items() if name not in further}


def _unsaved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the live buffers that are in no state dict: some change in training, and the rest costs little."""
    for prefix, inner in module.named_modules():
        for name in sorted(inner._non_persistent_buffers_set):  # noqa: SLF001 - torch has no public way to ask
            buffer = getattr(inner, name)
            if buffer is not None:
                yield _WRAPPERS.sub("", f"{prefix}.{name}" if prefix else name), buffer


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that never stepped the state that it will have, all zero, by a step without effect."""
    trained = [entry for group in optimizer.param_groups for entry in group["params"] if entry.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    # Not the schedule's wrapper around the method, which counts steps.
    type(optimizer).step(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()  # the step without effect was counted
