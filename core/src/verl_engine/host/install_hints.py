"""The commands in messages that install something, and that work where this core came from."""

import os
import re
from collections.abc import Iterable
from typing import Final

from verl_engine.host.distributions import installed_distributions, normalize_name

_OURS: Final = re.compile(r"(?P<name>verl-[a-z-]+)(?P<extras>\[[^\]]*\])?(?P<versions>[^;@]*)")


def pip_install(*what: str) -> str:
    """Write the command that installs something, options and requirements, with the Python that is running.

    A package of this project is named by its folder where the core was installed from a checkout that has it, by the
    folder of the wheels where it came from a wheel, and else by its name.
    """
    wheels, items = "", []
    for item in what:
        ours = _OURS.fullmatch(item)
        source, is_folder = _source(ours["name"]) if ours else ("", False)
        if ours and is_folder:
            items.append(f"{source}{ours['extras'] or ''}")
        else:
            wheels = wheels or source
            items.append(item)
    if wheels:
        items = ["--find-links", wheels, *items]
    return " ".join(["python", "-m", "pip", "install", *map(_quoted, items)])


def missing_line(requirements: Iterable[str]) -> str:
    """Write the part of a message that says how to install what is missing; nothing where all is there."""
    requirements = tuple(requirements)
    return f"; install what it needs: {pip_install(*requirements)}" if requirements else ""


def _quoted(item: str) -> str:
    return f'"{item}"' if any(character in item for character in "<>=!~ ;@[") else item


def _source(name: str) -> tuple[str, bool]:
    """Find where pip can get a package of this project: a folder of it or of wheels (False), or "" for an index."""
    core = installed_distributions().get("verl-engine-core")
    record = core.read("direct_url.json") if core else None  # PEP 610: what pip was given
    if not record:
        return "", False
    import json  # only where the core did not come from an index
    from urllib.parse import unquote, urlparse

    url = urlparse(str(json.loads(record).get("url", "")))
    if url.scheme != "file":
        return "", False
    path = os.path.normpath(unquote(url.path))
    if path.endswith(".whl"):
        return os.path.dirname(path), False  # noqa: PTH120 - as in `distributions`, which see
    root = os.path.dirname(path)  # noqa: PTH120
    folder = path if normalize_name(name) == "verl-engine-core" else f"{root}/plugins/{name.replace('-', '_')}"
    is_there = os.path.isfile(f"{folder}/pyproject.toml")  # noqa: PTH113
    return (folder, True) if is_there else ("", False)
