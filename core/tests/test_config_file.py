from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verl_engine.contract.config_file import read_config
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
model:
  path: models/tiny
data:
  seed: 7
  name: run-${data.seed}
engine:
  learning_rate: 1e-4
  betas: [0.9, 0.99]
evaluation:
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_values_keep_their_types_and_interpolations_are_resolved(file: Path) -> None:
    assert read_config(file, []) == {
        "model": {"path": "models/tiny"},
        "data": {"seed": 7, "name": "run-7"},
        "engine": {"learning_rate": 1e-4, "betas": [0.9, 0.99]},
        "evaluation": None,
    }


def test_overrides_are_yaml_applied_in_order_before_interpolation(file: Path) -> None:
    config = read_config(
        str(file),
        [
            "data.seed=8",
            "data.seed=9",
            "engine.learning_rate=3e-5",
            "engine.betas=[0.5, 0.6]",
            "model.path=a=b",
            "evaluation.prompts=held_out.jsonl",
            "trainer.num_steps=${data.seed}",
            "ray.address=null",
            "note=",
        ],
    )
    assert config["data"] == {"seed": 9, "name": "run-9"}
    assert config["engine"] == {"learning_rate": 3e-5, "betas": [0.5, 0.6]}
    assert config["model"]["path"] == "a=b"
    assert config["evaluation"] == {"prompts": "held_out.jsonl"}
    assert config["trainer"] == {"num_steps": 9}
    assert config["ray"] == {"address": None}
    assert config["note"] is None


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert read_config(tmp_path / "empty.yaml", ["a.b=1"]) == {"a": {"b": 1}}


def test_a_missing_file_names_its_neighbour(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"jobs\.yaml does not exist; did you mean .*job\.yaml\?"):
        read_config(file.with_name("jobs.yaml"), [])


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; the folder .*nowhere does not exist either"):
        read_config(tmp_path / "nowhere" / "job.yaml", [])


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(tmp_path, [])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model:\n  path: [1, 2\nengine: {}\n", "line 3"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: .*duplicate key a"),
        ("a:\n\tb: 1\n", "line 2"),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"job\.yaml, {place}"):
        read_config(tmp_path / "job.yaml", [])


@pytest.mark.parametrize(("text", "kind"), [("- 1\n- 2\n", "a list"), ("hello\n", "a single value"), ("5", "a single")])
def test_the_top_level_must_be_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"job\.yaml: the top level is {kind}.* must be a mapping"):
        read_config(tmp_path / "job.yaml", [])


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"job\.yaml cannot be read as UTF-8 text"):
        read_config(tmp_path / "job.yaml", [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.num_steps", "'trainer.num_steps' has no '='; write it as key=value"),
        ("=3", "empty part in its key ''"),
        ("a..b=3", "empty part in its key 'a..b'"),
        ("model.path.x=3", "model.path='models/tiny' is a value, not a section.*override model.path itself"),
        ("engine.betas.0=3", r"engine.betas=\[0.9, 0.99\] is a value"),
        ("data.seed=[1", r"'data.seed=\[1': the value is not valid YAML"),
        ("data.seed=${", r"override 'data.seed=\$\{'"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(file, [override])


@pytest.mark.parametrize("value", ["${data.sed}", "???", "${no_such_resolver:1}"])
def test_an_unresolved_interpolation_names_file_and_key(file: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml: model\.path: .*; give it a value"):
        read_config(file, [f"model.path={value}"])
