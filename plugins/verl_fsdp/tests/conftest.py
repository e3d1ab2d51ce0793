"""Shared by the tests of this plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")
