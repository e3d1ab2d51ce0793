"""The kit as a pytest class. Needs pytest; nothing else of the kit does."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from verl_engine.testing.conformance.check import Check, all_checks
from verl_engine.testing.conformance.kit import ConformanceKit


class EngineConformance:
    """Every check of the kit, each as a test of its own; see this package's example."""

    backend: ClassVar[str]
    """Its name, as ``verl-engine backends`` lists it."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of the engine section for every engine that is built."""
    ranks: ClassVar[int] = 2
    """How many there are where a check wants several."""
    only: ClassVar[tuple[str, ...]] = ("",)
    """Beginnings of the names of checks; the others are left out. Useful for a second class with other settings."""
    timeout_s: ClassVar[float] = 60.0
    """For each step of a check."""

    _kit: ClassVar[ConformanceKit]

    @classmethod
    def setup_class(cls) -> None:
        """Keep one kit, and so its ranks, for all checks of the class."""
        cls._kit = ConformanceKit(cls.backend, cls.settings, ranks=cls.ranks, timeout_s=cls.timeout_s)

    @classmethod
    def teardown_class(cls) -> None:
        """End the ranks."""
        cls._kit.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each check; pytest calls it."""
        checks = [check for check in all_checks() if check.name.startswith(self.only)]
        metafunc.parametrize("check", checks, ids=[check.name for check in checks])

    def test_conformance(self, check: Check) -> None:
        """Run one check."""
        outcome = self._kit.run(check)
        if outcome.status == "skipped":
            pytest.skip(outcome.reason)
        if outcome.status == "failed":
            pytest.fail(f"{check.name}: {check.proves}\n{outcome.reason}\n\n{outcome.details}", pytrace=False)
