"""The token of a job's own Ray cluster. That nobody gets in without it, an end-to-end test shows."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from verl_async.ray.local_cluster import _has_ended, token_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fault(19)
def test_a_cluster_has_a_token_of_its_own_whatever_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    file = tmp_path / "token"
    file.write_text("of an earlier job")
    with token_in(file):
        assert {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")} == {
            "RAY_AUTH_TOKEN_PATH": str(file)
        }
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert len(file.read_text()) == 64
    assert not file.exists()
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("disabled", "of another cluster")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.fault(14)
def test_a_process_that_ended_is_seen_and_stays_unreaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not _has_ended(process)
        process.kill()
        deadline = time.monotonic() + 30
        while not _has_ended(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, 0)  # as Ray's workers look whether it lives
