"""How all tests of the repository are run: in which order, in which of two workers, and what the end says of them."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

_ORDER = ("ranks", "jobs")
"""Groups that come first; each stays in one worker. The other worker begins with the second."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one kind together, so that ranks and clusters are started once and do not compete.

    Tests that start ranks share those; whole jobs share a Ray cluster; all others stay with their module.
    """
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
        failed = Counter(map(_without_number, _failed(terminalreporter)))
        for test, count in failed.most_common():
            terminalreporter.write_line(f"failed {count} of {times} times: {test}")
        if not failed:
            terminalreporter.write_line(f"no test failed in any of {times} runs")


def _group(item: pytest.Item) -> str:
    if isinstance(item, pytest.Function) and {"task", "cluster"} & set(item.fixturenames):
        return "jobs"
    return "ranks" if item.get_closest_marker("dist") else item.nodeid.partition("::")[0]


def _failed(terminalreporter: pytest.TerminalReporter) -> Iterable[str]:
    """Give the ids of tests that failed, also in their fixtures; once for each run."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    return {report.nodeid for report in reports}


def _without_number(test: str) -> str:
    """Leave out the number of the repetition and the worker's group from a test's id."""
    return re.sub(r"-?\d+-\d+\](@.*)?$", "]", test).removesuffix("[]")
