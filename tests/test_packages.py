"""The packages belong together: one version, one licence, entry points that exist."""

from __future__ import annotations

import re
from importlib.metadata import entry_points, metadata, requires, version

import pytest

import verl_engine
from tests.repository import PACKAGES, ROOT
from verl_engine.host.kinds import all_kinds, find_kind

CORE = "verl-engine-core"
PLUGINS = [package.name.replace("_", "-") for package in PACKAGES if package.name != "core"]


def test_core_says_its_version() -> None:
    assert version(CORE) == verl_engine.__version__


@pytest.mark.parametrize("plugin", PLUGINS)
def test_versions_move_in_lockstep(plugin: str) -> None:
    assert version(plugin) == verl_engine.__version__
    major, minor = (int(part) for part in verl_engine.__version__.split(".")[:2])
    [core] = [requirement for requirement in requires(plugin) or [] if requirement.startswith(CORE)]
    assert set(core.removeprefix(f"{CORE}[engine]").split(",")) == {f">={major}.{minor}", f"<{major}.{minor + 1}"}


@pytest.mark.parametrize("distribution", [CORE, *PLUGINS])
def test_metadata_says_what_a_user_must_know(distribution: str) -> None:
    about = metadata(distribution)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Summary"]


def test_core_asks_for_no_torch() -> None:
    assert [
        name for name in requires(CORE) or [] if "extra ==" not in name and re.match("torch|transformers|ray", name)
    ] == []


@pytest.mark.parametrize("kind", [kind.name for kind in all_kinds()])
def test_entry_points_lead_somewhere(kind: str) -> None:
    ours = [
        point
        for point in entry_points(group=find_kind(kind).group)
        if point.dist and point.dist.name in {CORE, *PLUGINS}
    ]
    assert ours
    for point in ours:
        assert point.load() is not None


def test_the_noxfile_knows_every_package_and_torch_is_pinned_once() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [path for package in PACKAGES if (path := str(package.relative_to(ROOT))) not in noxfile] == []
    [torch] = re.findall(r'TORCH = "(torch==[\d.]+)"', noxfile)
    assert torch in (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
