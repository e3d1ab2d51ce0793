from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForCausalLM

from core.tests.test_checkpoint_export import load, require_same, save
from core.tests.test_checkpoint_refusals import edit_manifest
from core.tests.test_checkpoint_store import trained
from core.tests.test_command import run
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job") / "checkpoints"
    store = CheckpointStore(root)
    for step in (1, 2):
        store.save(trained(step), step, {"epoch": step}, wait=True)
    return root


def test_a_table_shows_every_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "inspect", str(root)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "plain" in line]
    assert [re.split(r"\s*│\s*", row.strip("│ "))[0] for row in rows] == ["1", "2"]
    assert "KiB" in rows[0]
    assert " s " in rows[0]


def test_json_lists_them_oldest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "inspect", str(root), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in found] == [1, 2]
    assert found[1]["user_state"] == {"epoch": 2}
    assert (found[1]["backend"], found[1]["world_size"], found[1]["num_weights"]) == ("plain", 1, 4)
    assert found[1]["contents"] == ["model", "buffers", "optimizer", "schedule", "rng"]
    assert found[1]["bytes"] > 1000
    assert 0 <= found[1]["age_s"] < 3600


def test_one_checkpoint_is_shown_in_full(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(root / "step-00000002")
    assert run("checkpoint", "inspect", folder) == 0
    out = capsys.readouterr().out
    assert re.search(r"user state\s+\{\"epoch\": 2\}", out)
    assert re.search(r"weights\s+4 \(float32\)", out)
    assert run("checkpoint", "inspect", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["weights"]["inner.weight"] == {"shape": [2, 2], "dtype": "float32"}


def test_one_that_cannot_be_read_stands_in_the_table_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(trained(), step, wait=True)
    edit_manifest(store, format_version=7)
    assert run("checkpoint", "inspect", str(tmp_path)) == 1
    assert "format_version=7" in re.sub(r"\s*│\s*\n│[\s│]*", "", capsys.readouterr().out)
    assert run("checkpoint", "inspect", str(tmp_path), "--json") == 1
    first, second = json.loads(capsys.readouterr().out)
    assert "format_version=7" in first["error"]
    assert second["step"] == 2


def test_inspecting_imports_no_torch(root: Path) -> None:
    code = (
        "import pathlib, sys; from verl_engine.command.checkpoint import inspect; "
        f"inspect(pathlib.Path({str(root)!r})); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_an_export_of_the_newest_loads_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "model")
    model = load(folder)
    save(tmp_path, model, folder)
    out = tmp_path / "out"
    assert run("checkpoint", "export", str(tmp_path / "checkpoints"), "--output", str(out)) == 0
    assert re.search(r"\d+ weights, .* KiB, of .*step-00000001 are in .*out\n", capsys.readouterr().out)
    require_same(AutoModelForCausalLM.from_pretrained(out), model)
    arguments = ("checkpoint", "export", str(tmp_path / "checkpoints" / "step-00000001"), "--model", str(folder))
    assert run(*arguments, "--output", str(tmp_path / "half"), "--dtype", "float16", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(tmp_path / "half")
    assert report["files"] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "{root}/nothing"), "/nothing does not exist; give a folder"),
        (
            ("export", "{root}/nothing", "--output", "{root}/out"),
            "/nothing does not exist; give a folder",
        ),
        (("export", "{root}", "--output", "{root}/out", "--model", "{root}/nothing"), "is no folder"),
        (("export", "{root}", "--output", "{root}/out"), "holds no config.json; give the model folder"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(
    root: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("checkpoint", *(word.format(root=root) for word in arguments)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ((), " has no folder in it; give a folder that CheckpointStore saves in"),
        (("a/x", "b/y"), " has the folders a, b, none of which holds one; give"),
        (
            ("config.yaml", "model/config.json"),
            " is a job's folder, with the trained model in {folder}/model, and",
        ),
    ],
)
def test_a_folder_without_checkpoints_is_told_from_one_that_does_not_exist(
    tmp_path: Path, content: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in content:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert run("checkpoint", "inspect", str(tmp_path)) == 2
    assert f"error: {tmp_path}{says.format(folder=tmp_path)}" in capsys.readouterr().err


@pytest.mark.fault(33)
def test_a_folder_beside_the_checkpoints_is_told_where_they_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "inspect", str(root.parent)) == 2
    assert f"{root.parent} holds no checkpoint itself, but {root} does; give that" in capsys.readouterr().err


def test_help_teaches_both_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "--help") == 0
    out = capsys.readouterr().out
    assert "inspect" in out
    assert "export" in out
    assert run("checkpoint", "export", "--help") == 0
    out = capsys.readouterr().out
    assert "export outputs/run/checkpoints --output my_model" in out
    assert "DTYPE" in out
    assert run("checkpoint") == 2
    assert run("checkpoint", "burn") == 2
