from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.tests.fake_engine import pack
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.token_output import TokenOutput

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.temperature import Temperature


class Model(torch.nn.Module):
    """A matrix, tied to a second name, a bias, a frozen weight, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.outer = torch.nn.Linear(2, 2, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.inner.bias.fill_(1.0)

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        """Write names and values, as transformers would a model."""
        folder.mkdir()
        values = {name: tensor.tolist() for name, tensor in state_dict.items()}
        (folder / "weights.json").write_text(json.dumps(values), encoding="utf-8")


class PlainEngine(ModuleEngine):
    """Only what the base class leaves open."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Never called here."""
        raise NotImplementedError

    def clip_gradients(self) -> torch.Tensor:
        """As torch clips."""
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)


def make(**settings: Any) -> PlainEngine:
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1, **settings})
    return PlainEngine(config, Device("cpu"), Model())


def set_gradients(engine: PlainEngine, value: float) -> None:
    for parameter in engine.parameters.values():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, value)


def weights(engine: PlainEngine) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in engine.weight_specs()]
    return {name: tensor.clone() for name, tensor in engine.full_weights(names)}


def test_what_is_exported_is_what_a_model_folder_holds() -> None:
    specs = {spec.name: spec.shape for spec in make().weight_specs()}
    assert specs == {"inner.weight": (2, 2), "inner.bias": (2,), "frozen": (1,), "count": ()}


def test_a_snapshot_holds_what_is_trained_and_every_buffer() -> None:
    assert [name for name, _ in make().local_weights()] == ["inner.weight", "inner.bias", "count", "scratch"]


def test_a_step_moves_the_weights_and_drops_the_gradient() -> None:
    engine = make(betas=(0.0, 0.0), max_grad_norm=1e9, weight_decay=0.5)
    set_gradients(engine, 1.0)
    step = engine.optimizer_step()
    assert step.applied
    assert step.grad_norm == pytest.approx(6**0.5)  # six trained numbers, the tied ones once
    assert step.learning_rate == 0.1
    # AdamW: w * (1 - 0.1 * 0.5) - 0.1 * 1; the bias, a vector, is excluded from decay.
    after = weights(engine)
    torch.testing.assert_close(after["inner.weight"], torch.tensor([[0.85, 1.8], [2.75, 3.7]]))
    torch.testing.assert_close(after["inner.bias"], torch.tensor([0.9, 0.9]))
    assert after["frozen"].tolist() == [1.0]
    assert all(parameter.grad is None for parameter in engine.parameters.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    engine = make(warmup_steps=4)
    before = weights(engine)
    set_gradients(engine, value)
    step = engine.optimizer_step()
    assert not step.applied
    assert step.learning_rate == pytest.approx(0.1 / 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    assert not engine.optimizer.state
    set_gradients(engine, 1.0)
    assert engine.optimizer_step().learning_rate == pytest.approx(0.1 / 4)  # the schedule did not go on
    set_gradients(engine, 1.0)
    assert engine.optimizer_step().learning_rate == pytest.approx(0.2 / 4)


def test_a_given_rate_is_used_once_and_scaled_as_its_group_is() -> None:
    engine = make(learning_rate=0.2, warmup_steps=4)
    engine.optimizer.param_groups[0]["initial_lr"] = 0.1  # half of the engine's
    used: list[list[float]] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: used.append([group["lr"] for group in engine.optimizer.param_groups])
    )
    reported = []
    for rate in (None, 0.7, 0.0, None):
        set_gradients(engine, 1.0)
        reported.append(engine.optimizer_step(rate).learning_rate)
    assert reported == [pytest.approx(0.05), 0.7, 0.0, pytest.approx(0.2)]
    assert used == [[rate / 2, rate] for rate in reported]


class HalfEngine(PlainEngine):
    """Computes in float16, as it says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loss_scaler = LossScaler()

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Return what the loss below looks at."""
        del batch, temperature
        return TokenOutput(self.parameters["inner.bias"] * 3)

    def clip_gradients(self) -> torch.Tensor:
        """Divide the scale out first."""
        assert self.loss_scaler is not None
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.loss_scaler.scale
        return super().clip_gradients()


def summed(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    del batch
    return output.log_probs.sum(), {}


def test_the_loss_is_scaled_in_the_backward_only() -> None:
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1, "max_grad_norm": 1e9})
    engine = HalfEngine(config, Device("cpu"), Model())
    run = MicroBatchPass([pack([1])] * 2, summed, lambda _: nullcontext(), loss_scale=0.5)
    engine.forward_backward(run)
    assert float(run.totals.loss) == 12.0  # 3 * (1 + 1), twice
    gradient = engine.parameters["inner.bias"].grad
    assert gradient is not None
    assert gradient.tolist() == [65536 * 0.5 * 3 * 2] * 2
    step = engine.optimizer_step()
    assert step.grad_norm == pytest.approx(3 * 2**0.5)
    assert (step.applied, step.overflow) == (True, False)


def test_an_overflow_lowers_the_scale_and_is_skipped() -> None:
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1})
    engine = HalfEngine(config, Device("cpu"), Model())
    before = weights(engine)
    set_gradients(engine, float("inf"))
    step = engine.optimizer_step()
    assert (step.applied, step.overflow) == (False, True)
    assert engine.loss_scaler is not None
    assert engine.loss_scaler.scale == 32768.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    engine.loss_scaler.scale = 1.0
    set_gradients(engine, float("inf"))
    assert not engine.optimizer_step().overflow, "no lower scale can fix it: it is the gradient itself"


def test_the_rate_reported_is_the_engines_whatever_its_groups_have() -> None:
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1, "warmup_steps": 2})
    module = Model()
    groups: list[dict[str, Any]] = [{"params": [module.inner.bias], "lr": 0.0}, {"params": [module.inner.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine = PlainEngine(config, Device("cpu"), module, None, optimizer)
    rates = []
    for _ in range(3):
        set_gradients(engine, 1.0)
        rates.append(engine.optimizer_step().learning_rate)
    assert rates == pytest.approx([0.05, 0.1, 0.1])
    assert weights(engine)["inner.bias"].tolist() == [1.0, 1.0]


def test_gradients_are_clipped() -> None:
    engine = make(max_grad_norm=0.5)
    set_gradients(engine, 1.0)
    engine.clip_gradients()
    total = sum(float(p.grad.square().sum()) for p in engine.parameters.values() if p.grad is not None)
    assert total**0.5 == pytest.approx(0.5, rel=1e-5)
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.parameters.values())


def test_training_mode_reaches_every_module() -> None:
    engine = make(dropout="model")
    engine.set_training(False)
    assert not engine.module.get_submodule("inner").training
    engine.set_training(True)
    assert engine.module.get_submodule("inner").training


def test_full_weights_go_in_by_name_and_none_may_be_missing() -> None:
    engine = make()
    new = {name: tensor + 1 for name, tensor in weights(engine).items()}
    engine.load_full_weights(reversed(new.items()))
    assert all(torch.equal(tensor, new[name]) for name, tensor in weights(engine).items())
    with pytest.raises(WeightsError, match="1 weights are missing: frozen"):
        engine.load_full_weights((name, tensor) for name, tensor in new.items() if name != "frozen")
    with pytest.raises(WeightsError, match=r"weight other of shape \(1,\) does not fit: the model has no such weight"):
        engine.load_full_weights([("other", torch.zeros(1))])


def test_a_resumed_engine_goes_on_as_the_first(tmp_path: Path) -> None:
    first, second = make(warmup_steps=3), make(warmup_steps=3)
    for engine in (first, first, second):
        set_gradients(engine, 1.0)
        engine.optimizer_step()
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state"))
    for engine in (first, second):
        set_gradients(engine, 2.0)
    assert first.optimizer_step() == second.optimizer_step()
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())


def test_the_state_of_an_engine_that_never_stepped_counts_no_step() -> None:
    engine, untouched = make(), make()
    engine.state_dict()
    for each in (engine, untouched):
        set_gradients(each, 1.0)
        each.optimizer_step()
    assert all(torch.equal(tensor, weights(untouched)[name]) for name, tensor in weights(engine).items())


def test_a_saved_folder_is_whole_and_replaces_an_older_one(tmp_path: Path) -> None:
    engine, folder = make(), tmp_path / "model"
    folder.mkdir()
    (folder / "stale").write_text("", encoding="utf-8")
    engine.save_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in folder.iterdir()] == ["weights.json"]
    saved = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    assert saved == {name: tensor.tolist() for name, tensor in weights(engine).items()}


def test_moving_keeps_weights_and_optimizer_state() -> None:
    engine, untouched = make(), make()
    for each in (engine, untouched):
        set_gradients(each, 1.0)
        each.optimizer_step()
    engine.move(to_cpu=True)
    engine.move(to_cpu=False)
    for each in (engine, untouched):
        set_gradients(each, 1.0)
        each.optimizer_step()
    assert all(torch.equal(tensor, weights(untouched)[name]) for name, tensor in weights(engine).items())


def test_a_model_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(_: Model, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        folder.mkdir()
        (folder / "weights.json").write_text(str(len(state_dict)), encoding="utf-8")
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = make()
    engine.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "weights.json").read_text(encoding="utf-8")
    monkeypatch.setattr(Model, "save_pretrained", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        engine.save_pretrained(tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights.json").read_text(encoding="utf-8") == before
