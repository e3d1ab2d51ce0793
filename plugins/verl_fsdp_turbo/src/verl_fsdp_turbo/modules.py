"""The config's patterns, held against a model: each must mean something, and nothing that would go wrong."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_engine.contract.errors import ConfigError, ModelError
from verl_fsdp.model.blocks import own_blocks, tied_outside
from verl_fsdp_turbo.library_config import EACH_LAYER
from verl_fsdp_turbo.patterns import closest, matches

_FEWEST_EXPERTS = 2


def for_model(values: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Put the model's own layers where the config left them open, and check every pattern.

    The library fails only where none of a list of patterns fits; a misspelt one among others is ignored. What
    `library_config` gave stays unchanged.

    Raises:
        ConfigError: a pattern fits no module, or modules that cannot be sharded alone.
        ModelError: the model names no layers, or has too few experts.
    """
    told = copy.deepcopy(values)
    fsdp_plan, memory = told["distributed"]["fsdp_plan"], told["memory"]
    if EACH_LAYER in fsdp_plan["apply_modules"]:
        settings = fsdp_plan["apply_modules"][EACH_LAYER]
        fsdp_plan["apply_modules"] = dict.fromkeys(_layers(model, "engine.fsdp_plan.apply_modules"), settings)
    if memory.get("recompute_plan") == [EACH_LAYER]:
        memory["recompute_plan"] = _layers(model, "engine.memory.recompute_plan")
    names = {name: module for name, module in model.named_modules() if name}
    ep_plan = told["distributed"].get("ep_plan", {})
    for field, patterns in (
        ("fsdp_plan.apply_modules", fsdp_plan["apply_modules"]),
        ("ep_plan.apply_modules", ep_plan.get("apply_modules", ())),
        ("memory.recompute_plan", memory.get("recompute_plan", ())),
        ("memory.chunk_batch.apply_modules", memory.get("chunk_batch_plan", {}).get("apply_modules", ())),
    ):
        _require_matches(field, patterns, names)
    _require_untied(model, fsdp_plan["apply_modules"], names)
    if memory["chunk_batch"]:
        apart = _chosen(fsdp_plan["apply_modules"], names)
        experts = _chosen(ep_plan.get("apply_modules", ()), names)
        _require_quiet(_chosen(memory["chunk_batch_plan"]["apply_modules"], names), apart, experts)
    if ep_plan:
        _require_experts(ep_plan["apply_modules"], names, told["distributed"]["expert_parallel_size"])
    return told


def _layers(model: PreTrainedModel, field: str) -> list[str]:
    """Name the model's decoder layers, one by one: a pattern made from them could fit more."""
    blocks = {id(block) for block in own_blocks(model, f"name patterns of its layers in {field}; its classes are")}
    return [name for name, module in model.named_modules() if id(module) in blocks]


def _require_matches(field: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(
                f"engine.{field}: {pattern!r} fits no module of the model; close to it are {closest(pattern, names)}"
            )


def _require_untied(model: PreTrainedModel, patterns: Iterable[str], names: dict[str, torch.nn.Module]) -> None:
    """Refuse modules that share a weight with one outside: sharded apart they would each have their own, or fail."""
    chosen = [module for name, module in names.items() if any(matches(pattern, name) for pattern in patterns)]
    tied = tied_outside(model, chosen)
    if tied:
        raise ConfigError(
            f"engine.fsdp_plan.apply_modules: {', '.join(sorted(tied))} shares a weight with another module (the "
            "model's config ties them); leave both out, and they go with the rest of the model"
        )


def _require_quiet(chunked: Iterable[str], apart: Iterable[str], experts: Iterable[str]) -> None:
    """Refuse to run modules in parts whose parts would talk to other ranks: those may have another number of rows."""
    for name in chunked:
        talking = [other for other in apart if other.startswith(f"{name}.")]
        talking += [other for other in experts if f"{other}.".startswith(f"{name}.")]
        if talking:
            raise ConfigError(
                f"engine.memory.chunk_batch.apply_modules: {name} would run once for each part of the rows, and "
                f"{talking[0]} in it talks to other ranks each time: ranks with fewer rows would keep the others "
                "waiting forever; name modules without such ones inside"
            )


def _chosen(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def _require_experts(patterns: Iterable[str], names: dict[str, torch.nn.Module], num_ranks: int) -> None:
    for pattern in patterns:
        for name, module in names.items():
            if not matches(pattern, name):
                continue
            count = len(module) if isinstance(module, torch.nn.ModuleList) else getattr(module, "num_experts", None)
            if not isinstance(count, int):
                raise ModelError(
                    f"engine.ep_plan.apply_modules: {name}, a {type(module).__name__}, does not say how many experts "
                    "it holds (num_experts); name the modules that hold all experts of a layer"
                )
            if count % num_ranks or count // num_ranks < _FEWEST_EXPERTS:
                allowed = [str(size) for size in range(1, count // _FEWEST_EXPERTS + 1) if count % size == 0]
                raise ModelError(
                    f"engine.expert_parallel_size={num_ranks} does not fit the {count} experts of {name}: each rank "
                    f"must hold as many, and at least two, or the library fails; use one of {', '.join(allowed)}"
                )
