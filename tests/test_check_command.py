"""`verl-engine check`: what it prints, and its exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from tests.repository import ROOT, run_python
from verl_engine.command.app import main
from verl_engine.contract.backend import FEATURES
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.testing.conformance import Check, ConformanceKit, Outcome, all_checks

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "reference" / "conformance.md").read_text(encoding="utf-8")
WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None  # as if it were not installed
from verl_engine.command.app import main
main(["check", "fsdp2", "--only", "loading", "--only", "weights/export", "--json"])
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.mark.dist
def test_a_right_backend_as_json_without_pytest() -> None:
    done = run_python("-c", WITHOUT_PYTEST)
    assert done.returncode == 0, done.stderr
    *lines, report = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.pop("status") for line in lines] == ["passed"] * 4
    assert lines == report["passed"]
    passed = ["loading/listing", "loading/hooks_module", "loading/spec", "weights/export"]
    assert [entry["check"] for entry in report["passed"]] == passed
    assert report["failed"] == report["skipped"] == []
    assert (report["backend"], report["ranks"]) == ("fsdp2", 2)
    assert report["version"].startswith("verl-fsdp ")
    assert 0 < report["seconds"] < 120


@pytest.mark.dist
def test_a_table_with_what_was_skipped_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("fsdp2", "packing=false", "--ranks", "1", "--only", "gradient_sync", "--only", "config/fields") == 0
    text = capsys.readouterr().out
    assert "Conformance of fsdp2 (verl-fsdp " in text
    assert "says what each of its own means" in text
    assert "shows nothing on a single rank; ask for more, such as --ranks 2" in text
    assert "2 passed, 0 failed, 2 skipped in " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp9"], "error: backend 'fsdp9' is not a known backend; did you mean "),
        (["fsdp2", "no_such_field=1"], "error: engine.no_such_field is not a known key"),
        (["fsdp2", "--only", "no/such"], "error: --only no/such: no check's name starts with it; topics are"),
        (["fsdp2", "--ranks", "0"], "error: ranks=0 must be at least 1"),
        (["fsdp2", "--ranks", "1000000000"], "error: ranks=1000000000 must be at most 1024"),
        (["fsdp2", "--timeout", "0"], "error: timeout=0.0 must be a number of seconds above 0"),
        (["fsdp2", "--timeout", "nan"], "error: timeout=nan must be a number of seconds above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err.startswith(message)


def test_names_are_unique() -> None:
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
def test_the_reference_shows_every_check_with_what_it_needs(check: object) -> None:
    assert isinstance(check, Check)
    features = ", ".join(f"`{feature}`" for feature in check.features) or "every backend"
    assert f"| `{check.name}` | {check.proves} | {features} |" in PAGE


def test_the_reference_says_what_each_feature_is() -> None:
    for feature, meaning in FEATURES.items():
        assert f"| `{feature}` | {meaning.replace('``', '`')} |" in PAGE


@pytest.mark.fault(31)
def test_each_check_is_told_when_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[int] = []
    run_check = ConformanceKit.run

    def watched(kit: ConformanceKit, check: Check) -> Outcome:
        told.append(len(capsys.readouterr().out.splitlines()))
        return run_check(kit, check)

    monkeypatch.setattr(ConformanceKit, "run", watched)
    assert run("fsdp2", "--only", "loading", "--json") == 0
    assert told == [0, 1, 1]
    assert len(capsys.readouterr().out.splitlines()) == 2  # the last check's, and the summary


def test_what_a_backend_prints_does_not_spoil_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"print('a stray line')\n{HOOKS.format(name='noisy')}"
    write_distribution(tmp_path, "noisy", {BACKENDS_GROUP: {"noisy": "noisy_hooks"}}, modules={"noisy_hooks": text})
    monkeypatch.syspath_prepend(tmp_path)
    assert run("noisy", "--only", "loading/spec", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["check"] for entry in report["passed"]] == ["loading/spec"]


def test_a_torch_that_cannot_be_imported_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such library')", encoding="utf-8")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WITHOUT_PYTEST}"
    done = run_python("-c", code)
    assert done.returncode == 2
    assert "error: the kit of kind backend cannot be imported: ImportError: no such library; see" in done.stderr
    assert "Traceback" not in done.stderr
