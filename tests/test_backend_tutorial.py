"""The tutorial builds what `new-backend` writes, line by line, and the engine is as small as it says."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import write_distribution
from tests.backend_tutorial import DDP_FILES, PAGE, shown, write_ddp_engine
from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import render_project
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.testing.conformance import ConformanceKit

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import RankPools

PROJECT = render_project(BackendNames("my_engine", "my_engine", "my-engine", "My"))
ENGINE_FILES = [f"src/my_engine/{name}.py" for name in ("config", "hooks", "engine")]
MAX_LINES = 48
MAX_DDP_LINES = 110
DDP_CHECKS = (  # of what several ranks can get wrong; the nightly has all
    "loading/spec", "config/fields", "accumulation/all_ranks", "accumulation/bf16", "gradient_sync/last_only",
    "gradient_sync/every_micro_batch", "recovery/middle_micro_batch", "recovery/last_micro_batch", "recovery/backward",
    "optimizer/not_finite", "determinism/ranks_agree", "forward_only/refusal", "checkpoints/to_fewer_ranks",
    "deadlock/idle_ranks",
)  # fmt: skip


def lines_of_code(text: str) -> int:
    """Count lines without blank ones, comments and docstrings."""
    tree = ast.parse(text)
    docstrings = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for number, line in lines if number not in docstrings
    )


@pytest.mark.parametrize("path", [*ENGINE_FILES, "tests/test_conformance.py"])
def test_the_page_shows_the_file_that_is_written(path: str) -> None:
    assert shown(path) == [line for line in PROJECT[path].splitlines() if line.strip()]


def test_the_page_shows_no_other_python() -> None:
    titles = set(re.findall(r"```python(.*)\n", PAGE))
    assert titles == {f' title="{path}"' for path in [*ENGINE_FILES, *DDP_FILES, "tests/test_conformance.py"]}


def test_the_page_shows_the_entry_point() -> None:
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert toml in PROJECT["pyproject.toml"]


def test_the_engine_is_as_small_as_the_page_says() -> None:
    count = sum(lines_of_code(PROJECT[path]) for path in ENGINE_FILES)
    assert count <= MAX_LINES
    assert f"{count} lines of code" in " ".join(PAGE.split())


def test_the_engine_of_several_ranks_is_as_small_as_the_page_says() -> None:
    count = sum(lines_of_code("\n".join(shown(path))) for path in DDP_FILES)
    assert count <= MAX_DDP_LINES
    assert f"It is {count} lines of code" in " ".join(PAGE.split())


@pytest.fixture
def ddp_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of several ranks, installed outside of the repository."""
    keywords = ["verl-engine-api-2", "verl-engine-device-cpu"]
    point = {BACKENDS_GROUP: {"ddp_engine": "ddp_engine.hooks"}}
    write_distribution(tmp_path / "src", "ddp-engine", point, keywords=keywords)
    write_ddp_engine(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.fault(31, 32)
@pytest.mark.usefixtures("ddp_engine")
def test_the_engine_of_several_ranks_passes_the_kit(rank_pools: RankPools) -> None:
    with ConformanceKit("ddp_engine", lender=rank_pools.get) as kit:
        outcomes = [kit.run(check) for check in kit.all_checks() if check.name in DDP_CHECKS]
    assert [(outcome.check.name, outcome.reason) for outcome in outcomes if outcome.status != "passed"] == []
    assert len(outcomes) == len(DDP_CHECKS)


def test_lines_are_counted_right() -> None:
    assert (
        lines_of_code(
            '"""Doc,\n\nlong."""\n\nimport os  # why\n# alone\nx = """a\n\nb"""\n\ndef f():\n    """Doc."""\n'
        )
        == 4
    )
