"""A module that has names of its own is, from outside, one that has Hugging Face's."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.tests.test_module_engine import Model, PlainEngine, make, set_gradients, weights
from verl_engine import EngineConfig, ModelFiles, RenamedWeights, adamw, parameter_groups, write_model_folder
from verl_engine.engine.checkpoints.module import PART_OF
from verl_engine.engine.device import Device

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.fault(32)


def name_of(name: str) -> str:
    return name.removeprefix("own.")


def make_renamed() -> PlainEngine:
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1})
    module = torch.nn.Module()
    module.own = Model()
    return PlainEngine(config, Device("cpu"), module, weights=RenamedWeights(module, name_of))


def test_names_are_those_of_the_folder_everywhere() -> None:
    plain, renamed = make(), make_renamed()
    assert renamed.weight_specs() == plain.weight_specs()
    assert [name for name, _ in renamed.local_weights()] == [name for name, _ in plain.local_weights()]
    assert _names(renamed.state_dict()) == _names(plain.state_dict())


def test_either_goes_on_from_the_others_state() -> None:
    for first, second in ((make(), make_renamed()), (make_renamed(), make())):
        for value in (1.0, 0.5):
            set_gradients(first, value)
            first.optimizer_step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # what is in a state may be live
        for engine in (first, second):
            set_gradients(engine, 0.25)
            engine.optimizer_step()
        expected = weights(first)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second).items())


def test_weights_come_in_under_the_names_of_the_folder() -> None:
    renamed = make_renamed()
    other = {name: tensor + 1 for name, tensor in weights(make()).items()}
    renamed.load_full_weights(other.items())
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(renamed).items())


def test_a_folder_is_written_without_a_model_of_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"architectures": ["Some"], "torch_dtype": "float16"}')
    (tmp_path / "source" / "tokenizer.json").write_text("{ }")
    kept = weights(make_renamed())
    for _ in range(2):  # the second time over the first
        write_model_folder(kept.items(), ModelFiles.read(tmp_path / "source"), tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == kept.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in saved.items())
    config = ModelFiles.read(tmp_path / "saved").config()
    assert config == {"architectures": ["Some"], "torch_dtype": "float32"}
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{ }"


def test_groups_are_those_of_settings() -> None:
    model = Model()
    groups = parameter_groups(dict(model.named_parameters()), lambda name, _: {"lr": 1.0 if "bias" in name else 2.0})
    assert [(group["lr"], len(group["params"]), PART_OF in group) for group in groups] == [
        (2.0, 1, False),
        (1.0, 1, False),
    ]


def test_adamw_decays_vectors_where_that_is_asked_for() -> None:
    for decay_vectors, expected in ((False, [0.5, 0.0]), (True, [0.5, 0.5])):
        settings = {"backend": "plain", "weight_decay": 0.5, "decay_vectors": decay_vectors}
        optimizer = adamw(dict(Model().named_parameters()), EngineConfig.model_validate(settings), Device("cpu"))
        assert [group["weight_decay"] for group in optimizer.param_groups] == expected


def _names(state: dict[str, Any]) -> list[list[str]]:
    optimizer = state["optimizer"]
    groups = [name for group in optimizer["param_groups"] for name in group["params"]]
    return [sorted(part) for part in (state["model"], state["buffers"], optimizer["state"], groups)]
