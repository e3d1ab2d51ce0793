from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_engine.contract.config_file import literal, read_config
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.yaml_text import write_yaml

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


@pytest.mark.fault(23)
def test_file_and_overrides_are_yaml_1_2(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: {entropy: off, steps: 010, rate: 1e-6}", encoding="utf-8")
    config = read_config(tmp_path / "job.yaml", ["a.entropy2=off", "a.steps2=010", "a.rate2=1e-6", "a.clock=1:30"])
    assert config["a"] == {
        "entropy": "off",
        "steps": 10,
        "rate": 1e-6,
        "entropy2": "off",
        "steps2": 10,
        "rate2": 1e-6,
        "clock": "1:30",
    }


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seed=" + "9" * 5000, r"override 'data\.seed=9+…: the value is not valid YAML: line 1, .* 5000 digits"),
        ("data.seed=!!int foo", "'foo' is not of the type int"),
        ("data.seed=" + "[" * 300 + "]" * 300, "nested more than 50 deep"),
        (".".join(["a"] * 300) + "=1", "has more than 50 parts in its key"),
        ("x" * 5000, "has no '='"),
        ("model.path=\udcff", r"override 'model\.path=\\udcff' is not UTF-8 text"),
        ("model.\udcff=1", r"override 'model\.\\udcff=1' is not UTF-8 text"),
        ('model.path="\\ud800"', "half of a surrogate pair"),
        ('model={"\\ud800": 1}', "half of a surrogate pair"),
        ("model=${model}", "leads back to itself|Recursive"),
    ],
)
def test_values_that_no_setting_can_be_are_one_short_message(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(file, [override])
    assert len(str(caught.value)) < 500


@pytest.mark.fault(24)
def test_a_config_file_with_too_long_a_name_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_config(tmp_path / ("x" * 300 + ".yaml"))


@pytest.mark.fault(24)
@settings(deadline=None, max_examples=50)
@given(st.text(st.sampled_from("ab$\\{}.:'\" "), max_size=12))
def test_a_literal_text_stays_what_it_is(text: str) -> None:
    assume(text != "???")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(write_yaml(literal({"a": text, "b": [{"c": text}]})), encoding="utf-8")
        assert read_config(file) == {"a": text, "b": [{"c": text}]}
