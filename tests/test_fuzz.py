"""Broken configs and data files are refused in our words: no traceback, no hang, no value turned into another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fuzz.cases import Findings
from tests.fuzz.configs import fuzz_configs, job_kinds
from tests.fuzz.data_files import fuzz_data_files
from tests.fuzz.run import write_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fault(22, 23, 24, 25)
@pytest.mark.parametrize(
    ("num_configs", "num_files"), [(200, 100), pytest.param(6000, 1500, marks=pytest.mark.nightly)]
)
def test_broken_input_is_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_configs: int, num_files: int
) -> None:
    monkeypatch.chdir(tmp_path)
    findings = Findings()
    fuzz_configs(findings, tmp_path, write_files(tmp_path / "files"), num_configs)
    fuzz_data_files(findings, tmp_path, num_files)
    summary = findings.summary()
    assert not findings.report(), findings.report()
    assert summary["configs"] == num_configs
    assert summary["data_files"] >= num_files
    assert min(summary["accepted"], summary["refused"]) > num_configs // 10, "both must be tried"


def test_every_setting_of_every_backend_is_tried(tmp_path: Path) -> None:
    kinds = {kind.name: {place for place, _ in kind.settings} for kind in job_kinds(tmp_path)}
    assert {name.split()[-1] for name in kinds} >= {"fsdp", "fsdp2", "fsdp_turbo", "megatron"}
    assert "engine.ep_plan.dispatcher" in kinds["train with fsdp_turbo"]
    assert "engine.mindspeed.features" in kinds["sft with megatron"]
    shared = {"engine.lora.rank", "trainer.num_ranks", "evaluation.sets.held_out.num_prompts"}
    assert all(shared <= places for places in kinds.values())


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    findings = Findings()
    with findings.case("configs", "one"):
        json.loads("{")
    with findings.case("configs", "two"):
        tmp_path.joinpath("missing").read_text(encoding="utf-8")
    assert findings.summary()["tracebacks"] == 2
    assert "JSONDecodeError" in findings.report()
