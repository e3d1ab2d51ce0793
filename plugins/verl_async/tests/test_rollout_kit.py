"""The kit of rollout engines: the embedded one passes, and each mutant fails the check that is there for it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import write_distribution
from plugins.verl_async.tests.rollout_mutants import MUTANTS
from verl_async.rollout.kind import ROLLOUT
from verl_async.rollout.kit.kit import CHECKS, RolloutKit
from verl_async.rollout.spec import FEATURES
from verl_engine.command.app import main
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    points = {name: f"{found.__module__}:{found.__name__}" for name, (found, *_) in MUTANTS.items()}
    keywords = [f"{ROLLOUT.api_keyword}{ROLLOUT.api_version}"]
    write_distribution(folder, "mutants", {ROLLOUT.group: points}, keywords=keywords)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield folder


def test_the_embedded_engine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "embedded", "--kind", "rollout", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == []
    assert report["skipped"] == []
    assert [entry["check"] for entry in report["passed"]] == [check.name for check in CHECKS]
    assert ended.value.code == 0


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_fails_the_check_that_is_there_for_it(name: str, site: Path) -> None:
    del site
    _, fails, says = MUTANTS[name]
    kit = RolloutKit(name, timeout_s=30)
    [check] = [check for check in CHECKS if check.name == fails]
    try:
        outcome = kit.run(check)
    finally:
        kit.close()
    assert outcome.status == "failed", "not caught"
    assert says in outcome.reason, outcome.details


def test_every_check_has_a_mutant_and_every_feature_a_check() -> None:
    assert {check.name for check in CHECKS} == {fails for _, fails, _ in MUTANTS.values() if fails}
    covered = {feature for check in CHECKS for feature in check.features} | {"filtered_log_probs"}
    assert sorted(FEATURES.keys() - covered) == []


def test_settings_that_the_kit_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave dtype out"):
        RolloutKit("embedded", {"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="ranks=2 must be left out"):
        RolloutKit("embedded", ranks=2)
    with pytest.raises(ConfigError, match="timeout=0"):
        RolloutKit("embedded", timeout_s=0)
