from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.tests.fake_distributions import write_distribution
from verl_engine.command.app import main
from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import render_project, write_project
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.names import BACKENDS_GROUP


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["new-backend", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quick", BackendNames("quick", "quick", "quick", "Quick")),
        ("my-engine", BackendNames("my_engine", "my_engine", "my-engine", "My")),
        ("my_engine", BackendNames("my_engine", "my_engine", "my-engine", "My")),
        ("tensor2d_x", BackendNames("tensor2d_x", "tensor2d_x", "tensor2d-x", "Tensor2dX")),
        ("engine", BackendNames("engine", "engine", "engine", "Engine")),
    ],
)
def test_all_names_follow_from_one(name: str, expected: BackendNames) -> None:
    assert BackendNames.of(name) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "NAME='' must be lower-case letters and digits"),
        ("My Engine", "and start with a letter, such as my_engine"),
        ("2fast", "and start with a letter, such as fast"),
        ("a--b", "such as a_b"),
        ("-a", "such as a"),
        ("../escape", "such as escape"),
        ("für", "such as f_r"),
        ("lambda", "NAME='lambda' is a keyword of Python; choose another, such as lambda_engine"),
        ("match", "NAME='match' is a keyword of Python"),
        ("json", "NAME='json' is the name of another module, which the new package would hide"),
        ("mindspeed", "NAME='mindspeed' is the name of another module"),  # installed or not
        ("tests", "choose another, such as tests_engine"),
        ("fsdp2", "NAME='fsdp2' is taken by the distribution verl-fsdp"),
        ("pluggy", "NAME='pluggy' is taken by the distribution pluggy"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BackendNames.of(name)
    assert message in str(caught.value)


def test_the_name_of_an_installed_backend_is_refused(site: Path) -> None:
    write_distribution(site, "other-dist", {BACKENDS_GROUP: {"toy": "toy_hooks"}})
    with pytest.raises(ConfigError, match="NAME='toy' is taken by the distribution other-dist; choose another"):
        BackendNames.of("toy")


def test_the_class_of_an_engine_named_engine_has_a_prefix() -> None:
    text = render_project(BackendNames.of("engine"))["src/engine/engine.py"]
    assert "class EngineEngine(ModuleEngine):" in text


@pytest.mark.parametrize("name", ["quick", "my-engine"])
def test_every_placeholder_is_filled_in(name: str) -> None:
    names = BackendNames.of(name)
    project = render_project(names)
    assert sorted(project) == [
        ".github/workflows/ci.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        f"src/{names.package}/__init__.py",
        f"src/{names.package}/config.py",
        f"src/{names.package}/engine.py",
        f"src/{names.package}/hooks.py",
        f"src/{names.package}/py.typed",
        "tests/test_conformance.py",
    ]
    for path, text in project.items():
        assert "PACKAGE" not in text
        assert "$" not in text.replace("${{ matrix.python }}", "")
        if path.endswith(".py"):
            ast.parse(text)


def test_the_command_writes_a_folder_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("my_engine") == 0
    assert content(tmp_path) == ["my-engine"]
    assert "verl-engine check my_engine" in capsys.readouterr().out
    written = {str(path.relative_to("my-engine")) for path in Path("my-engine").rglob("*") if path.is_file()}
    assert written == render_project(BackendNames.of("my_engine")).keys()
    assert Path("my-engine").stat().st_mode & 0o777 == 0o777 & ~current_umask()


def content(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_there_already_is_left_alone(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine"
    if kind == "folder":
        output.mkdir()
    elif kind == "file":
        output.write_text("precious", encoding="utf-8")
    else:
        output.symlink_to(tmp_path / "nowhere")
    assert run("my_engine", "--output", str(output)) == 2
    assert f"--output='{output}' is there already; name a folder that does not exist" in capsys.readouterr().err
    assert content(tmp_path) == ["mine"]


def test_nothing_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = BackendNames.of("my_engine")
    write_text, written = Path.write_text, []

    def fill_the_disk(path: Path, text: str, encoding: str) -> int:
        written.append(path)
        if len(written) > 3:
            raise OSError("no space left on device")
        return write_text(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(ConfigError, match="cannot be written: no space left on device"):
        write_project(names, tmp_path / "mine")
    assert content(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--output='.*file/mine' cannot be made"):
        write_project(BackendNames.of("my_engine"), tmp_path / "file" / "mine")


def test_the_hooks_of_a_new_backend_load_without_torch(tmp_path: Path) -> None:
    write_project(BackendNames.of("my_engine"), tmp_path / "mine")
    code = (
        "import sys; from verl_engine import BackendHost; import my_engine.hooks as hooks;"
        "host = BackendHost.from_module(hooks);"
        "print(host.spec.name, sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    path = os.pathsep.join([str(tmp_path / "mine" / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "my_engine []\n"
