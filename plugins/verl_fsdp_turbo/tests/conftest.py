"""Shared by the tests of this plugin. They run over a stand-in of the library, which only they can find."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plugins.verl_fsdp_turbo.tests.on_ranks import prepare
from verl_engine.testing.rank_pool import RankPool
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[Path]:
    """Put the stand-in on the path of this process and of those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FAKES), os.environ.get("PYTHONPATH")])))
        patch.setattr(sys, "path", [str(FAKES), *sys.path])
        yield FAKES


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def pools(stand_in: Path) -> Iterator[list[RankPool]]:
    """The processes that stay, in a list of one."""
    assert stand_in.is_dir()
    pools = [RankPool(2, prepare=prepare)]
    yield pools
    pools[0].close()


@pytest.fixture
def ranks(pools: list[RankPool]) -> RankPool:
    """Two processes; after a failure others."""
    if pools[0].is_closed:
        pools[0] = RankPool(2, prepare=prepare)
    return pools[0]
