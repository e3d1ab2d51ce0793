"""Where things are in this repository; for the tests of its rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))
SOURCE_FOLDERS = ("core", "plugins", "tests", "examples", "docs", "benchmarks")


def python_files() -> list[Path]:
    """Every Python file of the repository."""
    files = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(
        [ROOT / "conftest.py", ROOT / "noxfile.py", *(path for path in files if "__pycache__" not in path.parts)]
    )


def source_files() -> list[Path]:
    """The Python files that users install."""
    return [path for path in python_files() if "src" in path.parts]


def run_python(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own, at most two minutes."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
