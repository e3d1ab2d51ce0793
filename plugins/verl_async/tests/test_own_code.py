"""A model folder that brings Python code: it is not run, nobody is asked, and the message says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from verl_async.orchestrator.inputs import ModelTexts
from verl_async.rollout.model_loading import load_model
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CODE = "import pathlib\npathlib.Path(__file__).with_name('it-ran').touch()\n"
REASON = r"needs Python code that the folder brings .* is never run; use a model whose classes"


def _load_texts(folder: Path) -> object:
    return ModelTexts.load(folder)


def _load_rollout(folder: Path) -> object:
    return load_model(folder, torch.float32, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of a kind that transformers does not know."""
    config = {
        "model_type": "their_own",
        "architectures": ["TheirsForCausalLM"],
        "auto_map": {
            "AutoConfig": "theirs.TheirConfig",
            "AutoModelForCausalLM": "theirs.TheirsForCausalLM",
            "AutoTokenizer": ["theirs.TheirTokenizer", None],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "TheirTokenizer", "auto_map": config["auto_map"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "theirs.py").write_text(CODE)
    return tmp_path


@pytest.mark.fault(21)
@pytest.mark.parametrize("load", [_load_texts, _load_rollout])
def test_code_of_a_model_folder_is_refused_without_a_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], object]
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ModelError, match=REASON) as caught:
        load(folder)
    assert "trust_remote_code" not in str(caught.value)
    assert not (folder / "it-ran").exists()
