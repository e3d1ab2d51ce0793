"""A library that is missing, broken, or older than a setting needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from verl_engine.contract.errors import PluginError
from verl_fsdp_turbo.library import INSTALL, require_library

if TYPE_CHECKING:
    from pathlib import Path

BUILD = """
from verl_engine.contract.errors import EngineError
from verl_fsdp_turbo.library import Library
try:
    library = Library()
    print(library.capabilities)
    library.build_config({"distributed": {"ulysses_parallel_size": 2, "cp_plan": {"ulysses_function_patches": []}}})
except EngineError as error:
    print(type(error).__name__, error)
"""


def without_path() -> dict[str, str]:
    """Return the environment without what makes the library known."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(program: str, path: Path | None, **environment: str) -> str:
    """Run a program in a process of its own, and return what it prints."""
    found = without_path() | ({} if path is None else {"PYTHONPATH": str(path)}) | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=found, check=True)
    return done.stdout


def test_a_missing_library_is_answered_with_the_steps_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PluginError) as caught:
        require_library()
    message = str(caught.value)
    assert INSTALL in message
    assert "git clone" in INSTALL
    assert "--before=" in INSTALL, "the commit is pinned"
    assert "PYTHONPATH" in message


def test_the_doctor_tells_how_to_get_it() -> None:
    program = "from verl_engine.command.app import main; main(['doctor', '--backend', 'fsdp_turbo', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=without_path(), check=False
    )
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["text"] == "missing module fsdp_turbo, which is on no package index"
    assert finding["fix"] == INSTALL


def test_the_conformance_kit_is_not_started_without_it() -> None:
    program = "from verl_engine.command.app import main; main(['check', 'fsdp_turbo'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=without_path(), check=False
    )
    assert done.returncode != 0
    assert f"install it with: {INSTALL}" in " ".join(done.stderr.split())


def test_a_broken_library_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "fsdp_turbo").mkdir()
    (tmp_path / "fsdp_turbo" / "__init__.py").touch()
    (tmp_path / "fsdp_turbo" / "fsdp_turbo.py").write_text("from torch.distributed.fsdp import _GoneForEver\n")
    printed = run(BUILD, tmp_path)
    assert printed.startswith("PluginImportError")
    assert "_GoneForEver" in printed
    assert str(tmp_path) in printed
    assert "from 2.9 to below 2.12" in printed


@pytest.mark.usefixtures("only_fake")
def test_what_a_release_can_do_is_asked_of_it(library_folder: Path) -> None:
    newest, oldest = run(BUILD, library_folder), run(BUILD, library_folder, FAKE_FSDP_TURBO_HAS="")
    assert "'ulysses_function_patches': True" in newest
    assert "ConfigError" not in newest
    assert "'reset_parallel_state': False" in oldest
    assert "ConfigError the installed fsdp_turbo does not know distributed.cp_plan.ulysses_function_patches" in oldest
