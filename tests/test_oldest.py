"""What the packages require at least is what `nox -s oldest` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
TESTED = ("core", "plugins/verl_fsdp", "plugins/verl_fsdp_turbo", "plugins/verl_megatron_mindspeed")


def required(package: str) -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    for text in [*project["dependencies"], *extras.get("engine", ()), *extras.get("testing", ())]:
        requirement = Requirement(text)
        if not requirement.name.startswith("verl"):
            yield requirement


@pytest.mark.fault(11)
@pytest.mark.parametrize("package", TESTED)
def test_the_oldest_versions_are_the_lower_bounds(package: str) -> None:
    lines = (ROOT / "constraints" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, filter(lambda line: line[0] != "#", lines))}
    for requirement in required(package):
        (version,) = (part.version for part in pins[canonicalize_name(requirement.name)].specifier)
        assert requirement.specifier.contains(version), requirement


@pytest.mark.fault(11)
def test_each_oldest_version_is_the_lower_bound_of_a_package() -> None:
    lines = (ROOT / "constraints" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    bounds = {
        f"{canonicalize_name(requirement.name)} {part.version}"
        for package in TESTED
        for requirement in required(package)
        for part in requirement.specifier
        if part.operator == ">="
    }
    for pin in map(Requirement, filter(lambda line: line[0] != "#", lines)):
        (version,) = (part.version for part in pin.specifier)
        shorter = {".".join(version.split(".")[:length]) for length in (1, 2, 3)}
        assert {f"{canonicalize_name(pin.name)} {each}" for each in shorter} & bounds, pin
