"""The output folder: claimed once, never somebody else's files, whole files or none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from plugins.verl_async.tests.report_jobs import lockstep_spans, train_job
from verl_async.report.output_folder import OutputError, OutputFolder
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path / "runs" / "first")
    assert folder.metrics.read_text() == ""
    assert [entry.name for entry in folder.path.iterdir()] == ["metrics.jsonl"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert OutputFolder.create(tmp_path).path == tmp_path


def test_the_path_holds_in_processes_of_other_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert OutputFolder.create(Path("first")).path == tmp_path / "first"


def test_a_filled_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"not empty: it holds notes\.txt; choose another --output, or pass --overwrite"
    ):
        OutputFolder.create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_check_changes_nothing(tmp_path: Path) -> None:
    OutputFolder.check(tmp_path / "new" / "deep")
    assert not list(tmp_path.iterdir())


def test_overwrite_deletes_an_earlier_job_only(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    folder.write_summary({"seconds": 1})
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    (tmp_path / ".report.html.12.tmp").write_text("half")
    OutputFolder.create(tmp_path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_overwrite_never_deletes_what_no_job_wrote(tmp_path: Path) -> None:
    OutputFolder.create(tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.tex, which no job wrote"):
        OutputFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_overwrite_never_deletes_the_model_that_the_job_starts_from(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    folder.model.mkdir()
    with pytest.raises(ConfigError, match="which this job reads"):
        OutputFolder.create(tmp_path, overwrite=True, inputs=[folder.model])
    assert folder.model.is_dir()


def test_overwrite_unlinks_a_linked_model_but_spares_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "weights").write_text("precious")
    folder = OutputFolder.create(tmp_path / "out")
    folder.model.symlink_to(target, target_is_directory=True)
    OutputFolder.create(folder.path, overwrite=True)
    assert (target / "weights").read_text() == "precious"
    assert not folder.model.exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        OutputFolder.create(tmp_path / "file" / below)


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(ConfigError, match="no permission to write in"):
        OutputFolder.create(tmp_path / "new")


def test_of_two_jobs_one_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = OutputFolder.check

    def check_then_lose_the_race(path: Path, *, overwrite: bool, inputs: Iterable[Path]) -> None:
        check(path, overwrite=overwrite, inputs=inputs)
        (path / "metrics.jsonl").touch()

    monkeypatch.setattr(OutputFolder, "check", check_then_lose_the_race)
    monkeypatch.setattr(OutputFolder, "_delete_earlier_results", lambda _self: None)
    with pytest.raises(ConfigError, match="just taken by another job"):
        OutputFolder.create(tmp_path)


def test_the_config_reads_back(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    job = train_job().model_dump(mode="json")
    folder.write_config(job)
    assert yaml.safe_load(folder.config.read_text()) == job
    assert list(yaml.safe_load(folder.config.read_text()))[:2] == ["model", "engine"]


def test_the_timeline_has_one_line_a_span(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    folder.write_timeline(lockstep_spans(1))
    lines = [json.loads(line) for line in folder.timeline.read_text().splitlines()]
    assert lines[0] == {"who": "rollouter-0", "what": "generate", "start_s": 0.0, "end_s": 0.5}
    assert len(lines) == 4


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OutputFolder.create(tmp_path)
    folder.write_summary({"seconds": 1})

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*summary\.json: No space left on device; make room"):
        folder.write_summary({"seconds": 2})
    assert json.loads(folder.summary.read_text()) == {"seconds": 1}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_a_summary_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_summary({"seconds": float("nan")})
    assert not folder.summary.exists()


def test_a_model_that_a_killed_job_was_saving_is_deleted_as_well(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    partial = folder.path / f".{folder.model.name}.tmp"  # the name under which engines write it
    partial.mkdir()
    (partial / "model.safetensors").touch()
    OutputFolder.create(tmp_path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
