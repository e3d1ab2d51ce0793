"""Try a release: build every package, check what came out, install it in fresh environments. Publishes nothing.

    python -m tests.release FOLDER

Needs a package index, and the tools build, twine and towncrier. What would be published is in FOLDER afterwards. Prints
one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, Final

from tests.repository import PACKAGES, ROOT

CONSTRAINTS: Final = ROOT / "constraints" / "cpu.txt"
CORE: Final = "verl-engine-core"


def main() -> None:
    """Do all of it; the first thing that is wrong ends it."""
    parser = argparse.ArgumentParser(description="Build, check and install every package.")
    parser.add_argument("folder", type=Path, help="for what is built; made if missing, emptied if not")
    folder: Path = parser.parse_args().folder.resolve()
    started = time.monotonic()
    files = build(folder)
    call(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    version = one_version(files)
    metrics = {
        "version": version,
        "changes": count_changes(version),
        "bytes": {file.name: file.stat().st_size for file in files},
        "installed": {name: try_install(name, version, folder) for name in map(distribution, PACKAGES)},
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(metrics))


def build(folder: Path) -> list[Path]:
    """Build the sdist of each package, and from that its wheel: so the sdist is known to be complete."""
    for old in folder.glob("*"):
        old.unlink()
    for package in PACKAGES:
        call(sys.executable, "-m", "build", "--outdir", str(folder), str(package))
    files = sorted(folder.iterdir())
    expect(len(files) == 2 * len(PACKAGES), f"expected an sdist and a wheel of each package, got {files}")
    return files


def one_version(files: list[Path]) -> str:
    """Return the version that all packages carry."""
    versions = {file.name.removesuffix(".tar.gz").split("-")[1] for file in files}
    expect(len(versions) == 1, f"the packages carry several versions: {sorted(versions)}")
    return versions.pop()


def count_changes(version: str) -> int:
    """Return how many changes the release would list; there must be some."""
    draft = call(sys.executable, "-m", "towncrier", "build", "--draft", "--version", version)
    count = len(re.findall(r"^- ", draft, re.MULTILINE))
    expect(count > 0, "changelog.d has no entries")
    return count


def try_install(name: str, version: str, wheels: Path) -> dict[str, Any]:
    """Install one package, by its name, in a fresh environment; import it, and list and load what it brings."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        call(sys.executable, "-m", "venv", folder)
        python = str(Path(folder) / "bin" / "python")
        pip = (python, "-m", "pip")
        call(*pip, "install", "-q", "-c", str(CONSTRAINTS), "--find-links", str(wheels), f"{name}=={version}")
        call(*pip, "check")
        installed = {item["name"] for item in json.loads(call(*pip, "list", "--format", "json"))}
        expect(name != CORE or "torch" not in installed, f"{CORE} alone installs torch")
        command = str(Path(folder) / "bin" / "verl-engine")
        call(command, "backends", folder=folder)
        listed = json.loads(call(command, "plugins", "--json", folder=folder))
        own = [plugin for plugin in listed if plugin["distribution"] == name]
        load = "from verl_engine.host.backend_host import BackendHost"
        load += "".join(f"; BackendHost.load('{plugin['name']}')" for plugin in own if plugin["kind"] == "backend")
        module = "verl_engine" if name == CORE else name.replace("-", "_")
        call(python, "-c", f"import {module}; {load}", folder=folder)
    brings = sorted(f"{plugin['kind']} {plugin['name']}" for plugin in own)
    return {"brings": brings, "distributions": len(installed), "seconds": round(time.monotonic() - started)}


def distribution(package: Path) -> str:
    """Return the name that a package is published under."""
    with (package / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["name"])


def call(*command: str, folder: Path | str = ROOT) -> str:
    """Run a command in a folder; it must succeed. Returns its standard output."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def expect(is_so: bool, otherwise: str) -> None:
    """End with a message unless something is so."""
    if not is_so:
        raise SystemExit(otherwise)


if __name__ == "__main__":
    main()
