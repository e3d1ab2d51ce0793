"""How all tests of the repository are run: their order, the two workers, the summary; fixtures of several folders."""

from __future__ import annotations

import gc
import re
import signal
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verl_engine.testing.rank_pool import PRELOADED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ROOT = Path(__file__).parent
_ORDER = ("ranks", "jobs")
"""Groups that come first; each stays in one worker. The other worker begins with the second."""
_REPETITION = "__pytest_repeat_step_number"
"""The parameter that pytest-repeat adds."""


def pytest_configure() -> None:
    """Let SIGHUP end the processes that tests start: under nohup it is ignored, and they would inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    PRELOADED.append("verl_fsdp.fsdp2.build")  # what most ranks run


def pytest_collection_finish() -> None:
    """Leave out of Python's garbage collections what stays: the modules and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder first on ``sys.path``, to write distributions into; modules imported from it are forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.hookimpl(tryfirst=True)  # before tests that are marked are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thin matrices out, and bring tests that belong to one worker together."""
    _thin_out(items)
    items.sort(key=lambda item: _turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker, so that ranks and clusters are started once and do not compete."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group  # noqa: SLF001 - what its documentation says a scheduler of one's own changes
    return scheduler


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what tests left to be printed; of tests that were repeated, which failed how often."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(str(value))
    times = config.getoption("count", 1)
    if times > 1:
        failed = Counter(map(without_number, _failed(terminalreporter)))
        for test, count in failed.most_common():
            terminalreporter.write_line(f"failed {count} of {times} times: {test}")
        if not failed:
            terminalreporter.write_line(f"no test failed in any of {times} runs")


def _group(nodeid: str) -> str:
    return _group_of_module(nodeid.partition("::")[0])


@cache
def _group_of_module(path: str) -> str:
    """Modules of whole jobs share a Ray cluster, those with tests that start ranks share ranks; others stand alone."""
    source = (_ROOT / path).read_text(encoding="utf-8")
    if "tests.end_to_end" in source:
        return "jobs"
    return "ranks" if "mark.dist" in source and not _is_of_kit(path) else path


def _turn(nodeid: str) -> int:
    """The two groups come first, then the conformance kits, which have ranks of their own and take long."""
    group = _group(nodeid)
    if group in _ORDER:
        return _ORDER.index(group)
    return len(_ORDER) + (not _is_of_kit(group))


def _is_of_kit(path: str) -> bool:
    return "/test_conformance" in path


def _thin_out(items: list[pytest.Item]) -> None:
    """Mark as nightly what ``@pytest.mark.thinned(…)`` allows; pyproject.toml says what it means."""
    matrices: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thinned"):
            run = item.callspec.params.get(_REPETITION)
            matrices[item.nodeid.partition("[")[0], run].append(item)
    for matrix in matrices.values():
        mark = matrix[0].get_closest_marker("thinned")
        assert mark is not None
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in matrix]
        kept = selection(rows, *mark.args) if mark.args else range(0, len(rows), mark.kwargs["one_in"])
        for index, item in enumerate(matrix):
            if index not in kept:
                item.add_marker(pytest.mark.nightly)


def selection(rows: list[dict[str, str]], strength: int) -> set[int]:
    """Choose rows such that values of so many parameters meet in one of those chosen wherever they meet in any."""
    meetings = {index: set(combinations(sorted(row.items()), strength)) for index, row in enumerate(rows)}
    missing = set().union(*meetings.values())
    kept = set()
    while missing:
        best = max(meetings, key=lambda index: len(meetings[index] & missing))
        missing -= meetings.pop(best)
        kept.add(best)
    return kept


def _failed(terminalreporter: pytest.TerminalReporter) -> Iterable[str]:
    """Give the ids of tests that failed, also in their fixtures; once for each run."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    return {report.nodeid for report in reports}


def without_number(test: str) -> str:
    """Leave out the number of the repetition and the worker's group from a test's id."""
    return re.sub(r"-?\d+-\d+\](@.*)?$", "]", test).removesuffix("[]")
