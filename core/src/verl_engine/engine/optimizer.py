"""AdamW as configured, over groups of parameters that torch can step together."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.engine.checkpoints.module import PART_OF
from verl_engine.engine.device import Device


def adamw(parameters: Mapping[str, torch.nn.Parameter], config: EngineConfig, device: Device) -> torch.optim.AdamW:
    """Build AdamW as configured, in its fused form where there is one.

    Args:
        parameters: by name, plain or sharded (DTensor) over any meshes; frozen ones are left out.
        config: the ``engine`` section.
        device: of this rank.
    """

    def settings(_: str, parameter: torch.nn.Parameter) -> dict[str, float]:
        is_decayed = parameter.ndim > 1 or config.decay_vectors
        return {"weight_decay": config.weight_decay if is_decayed else 0.0}

    return torch.optim.AdamW(
        # Groups by dims, also where their decay is the same: a resumed run may set another one.
        parameter_groups(parameters, settings, lambda _, parameter: parameter.ndim > 1),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=is_fused_on(device),
    )


def is_fused_on(device: Device) -> bool:
    """Whether AdamW has a fused form there: one pass over all parameters. Elsewhere torch takes its foreach form."""
    return device.kind in ("cpu", "cuda")


def parameter_groups(
    parameters: Mapping[str, torch.nn.Parameter],
    settings: Callable[[str, torch.nn.Parameter], Mapping[str, Any]],
    kind: Callable[[str, torch.nn.Parameter], Hashable] = lambda *_: None,
) -> list[dict[str, Any]]:
    """Divide the trained parameters by their settings, for an optimizer of torch.

    Sharded parameters of different meshes, and plain ones, are kept apart: the fused and foreach forms of torch's
    optimizers take no mix. In a checkpoint of a `ModuleEngine` they are one group again.

    Args:
        parameters: by name; frozen ones are left out.
        settings: gives those of a parameter, such as ``weight_decay``.
        kind: keeps parameters of different kinds in different groups, though their settings are the same.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            own = settings(name, parameter)
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault((kind(name, parameter), *own.items(), mesh), {"params": [], **own})["params"].append(
                parameter
            )
    settings_of = [key[:-1] for key in found]
    for key, made in found.items():
        if settings_of.count(key[:-1]) > 1:
            made[PART_OF] = settings_of.index(key[:-1])
    return list(found.values())
