"""An engine of one weight per token id, and its backend: enough to see what a training step asks for."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_engine import BackendHost, BackendSpec, EngineConfig, OptimizerStep, hookimpl
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.backend import Capabilities
from verl_engine.engine.base import DataParallel, Engine, TokenOutput, WeightSpec
from verl_engine.engine.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as SequenceOf
    from pathlib import Path

    from verl_engine.engine.temperature import Temperature

GAPS = dict.fromkeys(
    (
        "checkpoints",
        "entropy",
        "lora",
        "offload",
        "own_positions",
        "router_replay",
        "top_k_log_probs",
        "value_head",
        "weight_import",
        "weight_shards",
    ),
    "a test's engine has no model",
)
SPEC = BackendSpec(
    name="toy",
    config_class=EngineConfig,
    devices=("cpu",),
    capabilities=Capabilities(gaps={"snapshots": "a test's engine keeps none", **GAPS}),
)


class FakeEngine(Engine):
    """Log-prob of a token is its weight over the temperature; weights are those given, else zeros for eight tokens."""

    def __init__(self, weights: dict[str, torch.Tensor] | None = None, rank: int = 0, size: int = 1) -> None:
        self.config = EngineConfig(backend="toy", learning_rate=0.5)
        self.device = Device("cpu")
        self.data_parallel = DataParallel(rank, size, None)
        self.gradient_divisor = 1
        self.weights = weights or {"logits": torch.zeros(8, requires_grad=True)}
        self.calls: list[str] = []

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        self.calls.append(f"forward {batch.num_tokens}")
        log_probs = self.weights["logits"][batch.input_ids] / temperature
        return TokenOutput(torch.where(batch.loss_mask, log_probs, 0.0))

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        self.weights["logits"].grad = None

    def set_training(self, training: bool) -> None:
        self.calls.append(f"training {training}")

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(name, tuple(weight.shape), weight.dtype) for name, weight in self.weights.items()]

    def full_weights(self, names: SequenceOf[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.calls.append(f"gather {name}")
            yield name, self.weights[name].detach()

    def save_pretrained(self, folder: Path) -> None:
        raise NotImplementedError


def toy_host() -> BackendHost:
    """A backend that notes each hook in the engine's calls; its step is plain gradient descent."""

    @hookimpl
    def engine_create(config: EngineConfig, model_folder: Path, role: str) -> FakeEngine:
        raise NotImplementedError

    @hookimpl
    def engine_gradient_sync(engine: FakeEngine, is_last_micro_batch: bool) -> object:
        @contextmanager
        def sync() -> Iterator[None]:
            engine.calls.append(f"enter last={is_last_micro_batch}")
            yield
            engine.calls.append("leave")

        return sync()

    @hookimpl
    def engine_optimizer_step(engine: FakeEngine) -> OptimizerStep:
        engine.calls.append("step")
        weight = engine.weights["logits"]
        assert weight.grad is not None
        norm = weight.grad.norm().item()
        with torch.no_grad():
            weight -= engine.config.learning_rate * weight.grad
        weight.grad = None
        return OptimizerStep(norm, applied=True, learning_rate=engine.config.learning_rate)

    module = ModuleType("toy_hooks")
    for name, value in {
        "SPEC": SPEC,
        "engine_create": engine_create,
        "engine_gradient_sync": engine_gradient_sync,
        "engine_optimizer_step": engine_optimizer_step,
    }.items():
        setattr(module, name, value)
    return BackendHost.from_module(module)


def pack(*rows: list[int]) -> PackedBatch:
    """One micro-batch; all tokens but the first of each row are in the loss."""
    return PackedBatch.from_sequences([Sequence(np.array(row), np.arange(len(row)) > 0) for row in rows])
