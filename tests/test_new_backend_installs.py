"""From an empty folder to a proven engine: what `new-backend` writes builds, installs and passes the conformance kit.

All of it runs in a fresh virtual environment that holds only wheels of ours. Third-party packages are lent to it by a
.pth file, so nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backend_tutorial import write_ddp_engine
from tests.repository import ROOT
from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import render_project

GAPS = {"multi_rank", "resharding", "every_micro_batch_sync", "bf16", "fp16", "lora", "router_replay", "value_head"}


@dataclass(frozen=True)
class FreshEnvironment:
    """A virtual environment without pip, and a folder to work in."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> FreshEnvironment:
        """Install the core from a wheel, then lend third-party packages."""
        call(folder, sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        environment = cls(folder)
        # The wheel first: pip would find the lent core installed already, and do nothing.
        environment.install(ROOT / "core")
        lent = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        [site] = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "lent.pth").write_text("\n".join(lent), encoding="utf-8")
        return environment

    def install(self, project: Path) -> None:
        """Build a project's wheel and install it."""
        wheels = self.folder / f"wheels-{project.name}"
        offline = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")
        pip = (sys.executable, "-m", "pip")
        call(self.folder, *pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(project))
        [wheel] = wheels.iterdir()
        python = str(self.folder / "venv" / "bin" / "python")
        call(self.folder, *pip, "--python", python, "install", *offline, str(wheel))

    def run(self, *arguments: str, expect: int = 0) -> str:
        """Run the environment's own verl-engine; return what it prints."""
        return call(self.folder, str(self.folder / "venv" / "bin" / "verl-engine"), *arguments, expect=expect)


def call(folder: Path, *command: str, expect: int = 0) -> str:
    """Run a command that must end with an exit code; return its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    if command[0] == sys.executable:  # building: where hatchling is
        environment = dict(os.environ)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == expect, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """A fresh environment in which a new backend was written, built and installed."""
    pytest.importorskip("hatchling", reason="wheels are built with it: python -m pip install hatchling")
    environment = FreshEnvironment.make(tmp_path_factory.mktemp("fresh"))
    assert "my-engine" in environment.run("new-backend", "my-engine")
    environment.install(environment.folder / "my-engine")
    return environment


def test_a_wheel_would_carry_the_whole_template() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="wheels are built with hatchling").WheelBuilder
    templates = Path("verl_engine/command/templates")
    carried = {Path(file.distribution_path) for file in builder(str(ROOT / "core")).recurse_included_files()}
    written = {
        path.relative_to(ROOT / "core" / "src") for path in (ROOT / "core" / "src" / templates).rglob("*.template")
    }
    assert len(written) > 5
    assert written <= carried


@pytest.mark.nightly
@pytest.mark.slow
def test_the_wheel_carries_the_whole_template(fresh: FreshEnvironment) -> None:
    project = fresh.folder / "my-engine"
    for path, text in render_project(BackendNames("my_engine", "my_engine", "my-engine", "My")).items():
        assert (project / path).read_text(encoding="utf-8") == text


@pytest.mark.nightly
@pytest.mark.slow
def test_it_is_listed_as_ready(fresh: FreshEnvironment) -> None:
    backends = {entry["name"]: entry for entry in json.loads(fresh.run("backends", "--json"))}
    mine = backends["my_engine"]
    assert mine["status"] == "ready"
    assert mine["distribution"] == "my-engine"
    assert mine["plugin_api_version"] == 2
    assert mine["devices"] == ["cpu", "cuda", "npu"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_with_it(fresh: FreshEnvironment) -> None:
    found = json.loads(fresh.run("doctor", "--backend", "my_engine", "--patches", "--json"))
    assert found["ok"]
    assert found["patches"] == [{"backend": "my_engine", "patches": [], "waiting": [], "declared": {}, "error": ""}]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.dist
def test_it_passes_the_conformance_kit(fresh: FreshEnvironment) -> None:
    outcome: dict[str, Any] = json.loads(fresh.run("check", "my_engine", "--json").splitlines()[-1])
    assert outcome["failed"] == []
    assert len(outcome["passed"]) >= 15
    reasons = [skip["reason"] for skip in outcome["skipped"]]
    gaps = [re.match(r"declared gap '(\w+)': \w", reason) for reason in reasons]
    assert [reason for reason, gap in zip(reasons, gaps, strict=True) if not gap or gap[1] not in GAPS] == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.fault(31, 32)
def test_the_tutorials_engine_of_several_ranks_passes_it_too(fresh: FreshEnvironment) -> None:
    fresh.run("new-backend", "ddp_engine")
    write_ddp_engine(fresh.folder / "ddp-engine")
    fresh.install(fresh.folder / "ddp-engine")
    outcome = json.loads(fresh.run("check", "ddp_engine", "--json").splitlines()[-1])
    assert outcome["failed"] == []
    gaps = {skip["reason"].split("'")[1] for skip in outcome["skipped"]}
    assert gaps <= {"fp16", "lora", "value_head"}


@pytest.mark.nightly
@pytest.mark.slow
def test_its_own_tests_are_those_of_the_kit(fresh: FreshEnvironment) -> None:
    python = str(fresh.folder / "venv" / "bin" / "python")
    collected = call(fresh.folder / "my-engine", python, "-m", "pytest", "--collect-only", "-q")
    assert "TestMyEngine" in collected
