"""Parts of an engine on the CPU: what is copied, what stays together, what is refused meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.device import Device
from verl_engine.engine.offload import PARTS, GradientSlot, Offload
from verl_engine.engine.weights.engine_weights import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tied(torch.nn.Module):
    """Two layers with one weight and one buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.second = torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        table = torch.ones(2)
        self.first.register_buffer("table", table)
        self.second.register_buffer("table", table)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs))
        return outputs


class Moved:
    """A module that was trained a step, and its offload."""

    def __init__(self) -> None:
        self.module = Tied()
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.offload = Offload(EngineWeights(self.module), self.optimizer, Device("cpu"))
        self.backward()
        self.optimizer.step()

    @property
    def weight(self) -> torch.Tensor:
        return self.module.first.weight

    def gradient(self) -> torch.Tensor | None:
        return self.weight.grad

    def backward(self) -> None:
        self.module(torch.ones(1, 2)).sum().backward()

    def move(self, *parts: str, to_cpu: bool) -> None:
        self.offload.move(parts, [GradientSlot(self.weight)], to_cpu=to_cpu)


@pytest.fixture
def moved() -> Moved:
    """One of them."""
    return Moved()


@pytest.fixture
def copying() -> Iterator[None]:
    """Moves make new tensors, as they do between two devices."""

    def copy(_: Offload, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    with mock.patch.multiple(Offload, _to_host=copy, _to_device=copy):
        yield


@pytest.mark.usefixtures("copying")
def test_what_is_shared_stays_shared_and_parameters_stay_the_same_objects(moved: Moved) -> None:
    weight, before, table = moved.weight, moved.weight.data_ptr(), moved.module.first.table
    value = weight.detach().clone()
    moved.move(*PARTS, to_cpu=True)
    assert moved.weight is weight
    assert moved.module.second.weight is weight
    assert weight.data_ptr() != before
    assert moved.module.first.table is moved.module.second.table
    assert moved.module.first.table is not table
    assert torch.equal(weight, value)


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_moves_alone_and_once(moved: Moved, part: str) -> None:
    def places() -> dict[str, int]:
        assert moved.weight.grad is not None
        moment = moved.optimizer.state[moved.weight]["exp_avg"]
        tensors = dict(zip(PARTS, (moved.weight, moved.weight.grad, moment), strict=True))
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    before, moment_steps = places(), moved.optimizer.state[moved.weight]["step"]
    kept = [moved.weight.detach(), moved.weight.grad, moved.optimizer.state[moved.weight]["exp_avg"]]  # memory in use
    moved.move(part, to_cpu=True)
    after = places()
    assert {name for name in PARTS if before[name] != after[name]} == {part}
    moved.move(part, to_cpu=True)
    assert places() == after
    moved.move(part, to_cpu=False)
    moved.move(part, to_cpu=False)
    assert moved.optimizer.state[moved.weight]["step"] is moment_steps
    assert len(kept) == len(PARTS)


def test_a_gradient_on_another_device_than_its_parameter_is_held_until_both_are_together(moved: Moved) -> None:
    before = moved.gradient()
    assert before is not None
    gradient = before.clone()
    with mock.patch.object(GradientSlot, "takes", return_value=False):
        moved.move("gradients", to_cpu=True)
    assert moved.gradient() is None
    moved.move("gradients", to_cpu=False)
    found = moved.gradient()
    assert found is not None
    assert torch.equal(found, gradient)


def test_a_held_gradient_that_is_forgotten_does_not_come_back(moved: Moved) -> None:
    with mock.patch.object(GradientSlot, "takes", return_value=False):
        moved.move("parameters", to_cpu=True)
    moved.offload.forget_gradients()
    moved.move("parameters", to_cpu=False)
    assert moved.weight.grad is None


def test_a_slot_takes_only_what_torch_would_take() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert GradientSlot(parameter).takes(torch.zeros(1))
    assert not GradientSlot(parameter).takes(torch.zeros(1, device="meta"))
    assert GradientSlot(object(), "kept").takes(torch.zeros(1, device="meta"))


def test_what_needs_a_part_that_is_away_is_refused(moved: Moved) -> None:
    moved.move("parameters", "optimizer", to_cpu=True)
    with pytest.raises(
        UnsupportedError,
        match=r"cannot run the model: parameters of this engine were moved to the CPU; call "
        r"engine\.move\(to_cpu=False, parameters=True\) first",
    ):
        moved.backward()
    moved.move("parameters", to_cpu=False)
    moved.backward()
    with pytest.raises(UnsupportedError, match="cannot step the optimizer: optimizer of this engine"):
        moved.optimizer.step()
    moved.move("optimizer", to_cpu=False)
    moved.optimizer.step()
    moved.move("gradients", to_cpu=True)
    with torch.no_grad():
        moved.module(torch.ones(1, 2))
    with pytest.raises(UnsupportedError, match="cannot run the model: gradients of this engine"):
        moved.backward()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU to move from and to")
def test_from_a_gpu_each_part_goes_to_pinned_memory_and_its_own_memory_is_freed() -> None:
    module = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    offload = Offload(EngineWeights(module), optimizer, Device("cuda", torch.cuda.current_device()))
    values = [parameter.detach().cpu() for parameter in module.parameters()]
    held = torch.cuda.memory_allocated()
    for part in PARTS:
        before = torch.cuda.memory_allocated()
        slots = [GradientSlot(parameter) for parameter in module.parameters()]
        offload.move([part], slots, to_cpu=True)
        assert before - torch.cuda.memory_allocated() >= 4 * 1024 * 1024
    assert all(parameter.is_pinned() for parameter in module.parameters())
    assert all(parameter.grad is not None and parameter.grad.is_pinned() for parameter in module.parameters())
    assert all(torch.equal(found, value) for found, value in zip(module.parameters(), values, strict=True))
    offload.move(PARTS, [GradientSlot(parameter) for parameter in module.parameters()], to_cpu=False)
    assert torch.cuda.memory_allocated() >= held
    assert all(torch.equal(found.cpu(), value) for found, value in zip(module.parameters(), values, strict=True))
