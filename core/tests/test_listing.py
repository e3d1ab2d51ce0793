from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import write_distribution
from core.tests.test_command import run
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.host.install_hints import pip_install

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def three_backends(site: Path) -> Path:
    keywords = ["verl-engine-api-2", "verl-engine-device-cpu"]
    write_distribution(site, "toy-good", {BACKENDS_GROUP: {"toy1": "x"}}, keywords=keywords)
    write_distribution(site, "toy-poor", {BACKENDS_GROUP: {"toy2": "x"}}, keywords=keywords, requires=["no-such>=1"])
    write_distribution(site, "toy-old", {BACKENDS_GROUP: {"toy3": "x"}}, keywords=["verl-engine-api-0"])
    for name in ("toy-a", "toy-b"):
        write_distribution(site, name, {BACKENDS_GROUP: {"toy4": "x"}})
    return site


@pytest.mark.usefixtures("three_backends")
def test_backends_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("backends", "--json") == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["name"].startswith("toy")]
    assert rows[0] == {
        "kind": "backend",
        "name": "toy1",
        "distribution": "toy-good",
        "version": "1.0",
        "plugin_api_version": 2,
        "devices": ["cpu"],
        "status": "ready",
        "missing_requirements": [],
        "missing_modules": [],
        "fix": None,
    }
    assert [(row["name"], row["status"], row["fix"]) for row in rows[1:]] == [
        ("toy2", "missing no-such>=1", 'python -m pip install "no-such>=1"'),
        (
            "toy3",
            "needs plugin API 0, verl-engine-core has 2",
            "python -m pip install --upgrade toy-old",
        ),
        ("toy4", "name also offered by toy-b", "python -m pip uninstall toy-a  # to keep toy-b"),
        ("toy4", "name also offered by toy-a", "python -m pip uninstall toy-b  # to keep toy-a"),
    ]


@pytest.mark.usefixtures("three_backends")
def test_backends_as_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("backends") == 0
    text = capsys.readouterr().out
    for cell in ("name", "distribution", "version", "API", "devices", "status", "toy-good", "ready", "cpu"):
        assert cell in text
    assert 'backend toy2: python -m pip install "no-such>=1"\n' in text


def test_without_backends_a_first_one_is_recommended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verl_engine.command.listing.list_plugins", lambda _: [])
    assert run("backends") == 0
    assert pip_install("verl-fsdp") in capsys.readouterr().out
    assert run("backends", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_listing_backends_imports_none_and_nothing_heavy(three_backends: Path) -> None:
    (three_backends / "x.py").write_text("raise RuntimeError", encoding="utf-8")
    script = """
import sys
from verl_engine.command.app import main
try:
    main(["backends", "--json"])
finally:
    heavy = {"torch", "transformers", "ray", "pydantic", "numpy", "omegaconf", "pluggy", "typer", "rich", "packaging",
             "importlib.metadata", "x"}
    print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "toy1" in done.stdout
    assert done.stderr == "[]\n"
