"""Fixtures of the async job's tests."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.job_files import train_settings, write_backend, write_recipe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with the toy backend, on the path of this process and of those that it starts."""
    folder = write_backend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "toy_engine_hooks", raising=False)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, site: Path) -> Path:
    assert site.is_dir()
    return write_recipe(tmp_path / "recipe.yaml", train_settings(tmp_path))
