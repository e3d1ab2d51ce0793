"""How all tests of the repository are run: in which order, in which of two workers, and what the end says of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

_ORDER = ("ranks", "jobs")
"""Groups that come first; each stays in one worker. The other worker begins with the second."""
_REPETITION = "__pytest_repeat_step_number"
"""The parameter that pytest-repeat adds."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one kind together, so that ranks and clusters are started once and do not compete.

    Tests that start ranks share those; whole jobs share a Ray cluster; all others stay with their module.
    """
    _thin_out(items)
    groups = {item: _group(item) for item in items}
    items.sort(key=lambda item: _ORDER.index(groups[item]) if groups[item] in _ORDER else len(_ORDER))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


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


def _group(item: pytest.Item) -> str:
    if isinstance(item, pytest.Function) and {"task", "cluster"} & set(item.fixturenames):
        return "jobs"
    return "ranks" if item.get_closest_marker("dist") else item.nodeid.partition("::")[0]


def _thin_out(items: list[pytest.Item]) -> None:
    """Mark as nightly what ``@pytest.mark.thinned(n)`` allows: all but a selection in which any n values meet."""
    matrices: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thinned"):
            run = item.callspec.params.get(_REPETITION)
            matrices[item.nodeid.partition("[")[0], run].append(item)
    for matrix in matrices.values():
        mark = matrix[0].get_closest_marker("thinned")
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in matrix]
        kept = selection(rows, mark.args[0] if mark else 1)
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
