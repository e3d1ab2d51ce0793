"""Shared by the tests of this plugin.

They run over a fake of the library, which only they can find; or over the real one, where FSDP_TURBO_PATH names the
folder that has it: `nox -s turbo_real`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plugins.verl_fsdp_turbo.tests.on_ranks import prepare, tidy
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

REAL = os.environ.get("FSDP_TURBO_PATH")
LIBRARY = Path(REAL).resolve() if REAL else Path(__file__).parent / "fakes"


@pytest.fixture(scope="module", autouse=True)
def library_folder() -> Iterator[Path]:
    """Put the library on the path of this process and of those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(LIBRARY), os.environ.get("PYTHONPATH")])))
        patch.setattr(sys, "path", [str(LIBRARY), *sys.path])
        yield LIBRARY


@pytest.fixture(scope="session")
def only_fake() -> None:
    """Skip a test that needs another release, or looks where only the fake lets it."""
    if REAL:
        pytest.skip("the fake alone can do this; FSDP_TURBO_PATH names a real library")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def ranks(rank_pools: RankPools, library_folder: Path) -> RankPool:
    """Two processes that stay for other tests."""
    assert library_folder.is_dir()
    return rank_pools.get(2, prepare=prepare, tidy=tidy)
