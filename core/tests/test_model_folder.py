"""A saved model: weights, and the files of its source as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.tests.test_module_engine import PlainEngine
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.device import Device
from verl_engine.testing.tiny_models import write_tiny_critic, write_tiny_model

FILES = {
    "generation_config.json": '{"eos_token_id": 2, "temperature": 0.6, "top_p": 0.9}',  # refused when it is saved
    "tokenizer_config.json": '{ "model_max_length":1e30,"kept": "as it is" }',
    "chat_template.jinja": "{{ messages }}\r\n",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "modeling_own.py": "# code\n",
    "tokenizer.model": "\x00\x01",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as transformers 4 wrote it, with a setting of generation in its config, which is refused when saved."""
    folder = write_tiny_model(tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rope_theta": 500.0, "temperature": 0.6, "torch_dtype": "float16", "of_another_tool": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    for name, text in FILES.items():
        (folder / name).write_bytes(text.encode())
    return folder


def engine_of(folder: Path, **settings: Any) -> PlainEngine:
    config = EngineConfig.model_validate({"backend": "plain", **settings})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PlainEngine(config, Device("cpu"), model)


@pytest.mark.fault(10, 12)
def test_all_but_weights_is_that_of_the_source_also_where_that_is_gone(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    engine = engine_of(source)
    shutil.rmtree(source)
    engine.save_pretrained(tmp_path / "saved")
    assert {name: (tmp_path / "saved" / name).read_bytes() for name in FILES} == {
        name: text.encode() for name, text in FILES.items()
    }
    assert json.loads((tmp_path / "saved/config.json").read_text()) == {**config, "torch_dtype": "float32"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    state = engine.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


@pytest.mark.fault(10)
def test_an_export_of_a_checkpoint_holds_the_same_files(source: Path, tmp_path: Path) -> None:
    engine = engine_of(source)
    engine.save_pretrained(tmp_path / "saved")
    store = CheckpointStore(tmp_path / "checkpoints", model_folder=source)
    store.save(engine, 1, wait=True)
    (checkpoint,) = (tmp_path / "checkpoints").glob("*1")
    export_checkpoint(checkpoint, tmp_path / "exported")
    saved, exported = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "saved", tmp_path / "exported")
    )
    assert saved == exported


@pytest.mark.fault(12)
def test_a_file_that_cannot_be_written_costs_no_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(source)
    write = Path.write_bytes

    def refuse(path: Path, content: bytes) -> int:
        if path.name == "tokenizer.model":
            raise OSError("refused")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    engine.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()
    assert not (tmp_path / "saved/tokenizer.model").exists()
    assert "tokenizer.model cannot be written (refused)" in caplog.text


@pytest.mark.fault(12)
def test_weights_that_transformers_cannot_write_are_saved_as_they_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(source)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "save_pretrained", refuse)
    engine.save_pretrained(tmp_path / "saved")
    assert "transformers cannot write the model (ValueError: refused)" in caplog.text
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    state = engine.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


@pytest.mark.fault(10)
def test_a_saved_critic_is_a_token_classifier_with_one_label(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    config = transformers.AutoConfig.from_pretrained(source)
    config.num_labels = 1
    model = transformers.AutoModelForTokenClassification.from_pretrained(source, config=config)
    engine = PlainEngine(EngineConfig.model_validate({"backend": "plain", "head": "value"}), Device("cpu"), model)
    engine.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForTokenClassification"]
    assert (saved["id2label"], saved["classifier_dropout"]) == ({"0": "LABEL_0"}, 0.0)
    named = write_tiny_critic(tmp_path / "critic")
    own = json.loads((named / "config.json").read_text()) | {"id2label": {"0": "good"}, "label2id": {"good": 0}}
    (named / "config.json").write_text(json.dumps(own))
    model = transformers.AutoModelForTokenClassification.from_pretrained(named)
    PlainEngine(engine.config, Device("cpu"), model).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["id2label"] == {"0": "good"}
