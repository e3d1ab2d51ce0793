"""The command on the page is found, explains itself and fails as the page says."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from core.tests.fake_distributions import write_distribution
from tests.repository import ROOT, run_python

PAGE = (ROOT / "docs" / "how-to" / "write-a-command.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the page's package; returns the folder for PYTHONPATH."""
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    project = tomllib.loads(text)["project"]
    write_distribution(tmp_path, project["name"], project["entry-points"], version=project["version"])
    (tmp_path / "my_tools").mkdir()
    (tmp_path / "my_tools" / "count.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return str(tmp_path)


def test_the_command_explains_itself(installed: str) -> None:
    done = run_python("-m", "verl_engine", "count-tokens", "--help", PYTHONPATH=installed)
    assert done.returncode == 0, done.stderr
    assert "Count the tokens of each prompt" in done.stdout


@pytest.mark.usefixtures("installed")
def test_the_test_of_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1], test)  # noqa: S102 - what the page shows
    test["test_a_missing_file_is_one_line"]()
