"""Installed distributions, read from their metadata folders.

Importing ``importlib.metadata`` alone costs more than half of what `verl-engine backends` may take (48 of 80 ms): it is
the fallback for zip files and other finders.
"""
# os.path, because importing pathlib takes longer than the whole scan.
# ruff: noqa: PTH113, PTH118, PTH123, PTH208

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.metadata import Distribution as ImportlibDistribution


class Distribution(NamedTuple):
    """One installed distribution."""

    name: str
    version: str
    read: Callable[[str], str | None]
    """Text of a file in its metadata folder, such as ``entry_points.txt``; None where there is none."""

    @property
    def key(self) -> str:
        """The name as pip compares it."""
        return normalize_name(self.name)

    def read_headers(self) -> list[tuple[str, str]]:
        """Fields of METADATA (or an egg's PKG-INFO) in order, names in lower case; without the long description."""
        headers: list[tuple[str, str]] = []
        for line in (self.read("METADATA") or self.read("PKG-INFO") or "").splitlines():
            if not line.strip():
                break
            if line[0] in " \t":  # goes on from the line above
                if headers:
                    headers[-1] = (headers[-1][0], f"{headers[-1][1]} {line.strip()}")
                continue
            field, _, text = line.partition(":")
            headers.append((field.strip().lower(), text.strip()))
        return headers

    def read_entry_points(self, group: str) -> list[tuple[str, str]]:
        """Name and value of each entry point of a group; lines that cannot be read are passed over."""
        found: list[tuple[str, str]] = []
        current = ""
        for raw in (self.read("entry_points.txt") or "").splitlines():
            line = raw.strip()
            if line.startswith("["):
                current = line.strip("[]").strip()
            elif current == group and not line.startswith(("#", ";")):
                name, equals, value = line.partition("=")
                if equals and name.strip() and value.strip():
                    found.append((name.strip(), value.partition("[")[0].strip()))  # extras in brackets are obsolete
        return found


def normalize_name(name: str) -> str:
    """Bring a distribution's name to the form that pip compares: ``Verl_FSDP`` is ``verl-fsdp``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_distributions() -> dict[str, Distribution]:
    """Every distribution that an import could find now, by normalised name; the first on ``sys.path`` counts."""
    found: dict[str, Distribution] = {}
    paths: list[object] = list(sys.path)
    for path in paths:
        if not isinstance(path, str):  # a Path, say: imports pass over it as well
            continue
        for distribution in _in_path(path or "."):
            found.setdefault(distribution.key, distribution)
    for distribution in _from_other_finders():
        found.setdefault(distribution.key, distribution)
    return found


def _in_path(path: str) -> Iterator[Distribution]:
    if path.endswith(".egg") or os.path.isfile(path):
        yield from _in_archive(path)
        return
    try:
        names = sorted(os.listdir(path))
    except OSError:  # on sys.path, but not there or not readable: imports skip it as well
        return
    for name in names:
        stem, dot, kind = name.rpartition(".")
        # pip renames what it could not remove to ~name
        if dot and kind in {"dist-info", "egg-info"} and not stem.startswith("~"):
            project, _, version = stem.partition("-")
            folder = os.path.join(path, name)
            read = partial(_read, folder)
            if not version:  # the egg-info of a source tree has it inside
                version = dict(Distribution("", "", read).read_headers()).get("version", "unknown")
            yield Distribution(project.replace("_", "-"), version, read)


def _read(folder: str, name: str) -> str | None:
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # most distributions have no entry points; old egg-info files are no folders
        return None


def _in_archive(path: str) -> Iterator[Distribution]:
    """Distributions in a zip file or an egg on ``sys.path``."""
    from importlib.metadata import DistributionFinder, MetadataPathFinder  # slow to import and seldom needed

    for found in MetadataPathFinder.find_distributions(DistributionFinder.Context(path=[path])):
        yield from _converted(found)


def _from_other_finders() -> Iterator[Distribution]:
    """Distributions that only an import hook knows of, such as an application's own loader."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_distributions", None)
        if find is None or getattr(finder, "__module__", "") == "_frozen_importlib_external":
            continue
        from importlib.metadata import DistributionFinder  # slow to import and seldom needed

        try:
            yield from [each for found in find(DistributionFinder.Context()) for each in _converted(found)]
        except Exception:  # noqa: BLE001, S112 - a plugin's finder that fails must not hide all other plugins
            continue


def _converted(found: ImportlibDistribution) -> Iterator[Distribution]:
    name = found.metadata["Name"]
    if name:  # broken metadata has none
        yield Distribution(name, found.version, found.read_text)
