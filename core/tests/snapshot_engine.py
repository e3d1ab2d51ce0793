"""A small engine with snapshots: one process, weights of many kinds."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from verl_engine import BackendHost, BackendSpec, Capabilities, EngineConfig, hookimpl
from verl_engine.engine.device import Device
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.snapshots.manager import Snapshots
from verl_engine.engine.token_output import TokenOutput

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.temperature import Temperature


SPEC = BackendSpec("keeping", EngineConfig, ("cpu",), Capabilities(gaps={"lora": "a few weights"}))


class Model(torch.nn.Module):
    """One logit a token, a frozen weight, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.arange(40.0).reshape(5, 8).t())  # not contiguous
        self.small = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)


class KeepingEngine(ModuleEngine):
    """Log-probs are sums of the logits, no more."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        numbers = self.parameters["logits"].sum(1)[batch.input_ids] / temperature
        return TokenOutput(torch.where(batch.loss_mask, numbers, 0.0))

    def clip_gradients(self) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)


@hookimpl
def engine_create(config: EngineConfig, model_folder: Path) -> KeepingEngine:
    del model_folder
    return KeepingEngine(config, Device("cpu"), Model())


def make_engine(**settings: Any) -> KeepingEngine:
    config = EngineConfig.model_validate({"backend": "keeping", "learning_rate": 0.1, **settings})
    return KeepingEngine(config, Device("cpu"), Model())


def make_snapshots(engine: KeepingEngine, **arguments: Any) -> Snapshots:
    module = ModuleType("keeping_hooks")
    vars(module).update({"SPEC": SPEC, "engine_create": engine_create})
    return Snapshots(BackendHost.from_module(module), engine, **arguments)


def values(engine: KeepingEngine) -> dict[str, torch.Tensor]:
    """Copies of what a snapshot holds."""
    return {name: tensor.clone() for name, tensor in engine.local_weights()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def change(engine: KeepingEngine, value: float) -> None:
    """Overwrite all weights in place, as torch sees it."""
    with torch.no_grad():
        for tensor in (*engine.parameters.values(), *engine.module.buffers()):
            tensor.fill_(value)
