"""Write a new backend's project from ``string.Template`` files; ``PACKAGE`` in a path stands for the package."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from verl_engine import __version__
from verl_engine.command.backend_names import BackendNames
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.names import PLUGIN_API_VERSION

SUFFIX: Final = ".template"
"""On each file of the template, so that no tool takes it for what it will be."""


def render_project(names: BackendNames) -> dict[str, str]:
    """Return the text of each file, by its path in the project."""
    major, minor = (int(part) for part in __version__.split(".")[:2])
    words = {
        "api_version": str(PLUGIN_API_VERSION),
        "backend": names.backend,
        "core_range": f">={major}.{minor},<{major}.{minor + 1}",
        "distribution": names.distribution,
        "package": names.package,
        "prefix": names.prefix,
    }
    root = files("verl_engine.command").joinpath("templates").joinpath("backend")
    return {
        path.replace("PACKAGE", names.package).removesuffix(SUFFIX): Template(text).substitute(words)
        for path, text in _template_files(root)
    }


def write_project(names: BackendNames, folder: Path) -> None:
    """Write the project to a folder that is not there yet, and appears when it is whole; a ConfigError if it cannot."""
    texts = render_project(names)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"--output={str(folder)!r} cannot be made: {error}") from error
    try:
        for path, text in texts.items():
            file = partial / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        partial.chmod(0o777 & ~_umask())  # mkdtemp keeps others out
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"--output={str(folder)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _template_files(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each file below a folder, also where the package lies in a zip file."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _template_files(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield f"{path}{entry.name}", entry.read_text(encoding="utf-8")


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
