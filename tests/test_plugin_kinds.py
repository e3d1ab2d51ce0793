"""One loader for every kind of plugin: the same listing, and the same errors, also for kinds that packages bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import write_distribution
from verl_engine import DuplicatePluginError, HookError, PluginApiVersionError, PluginImportError, UnknownPluginError
from verl_engine.command.app import main
from verl_engine.contract.kinds import KIND
from verl_engine.host.kinds import all_kinds, find_kind
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("backend", "observer", "command", "kind", "rollout")


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_the_kinds_are_the_cores_and_those_that_packages_bring() -> None:
    assert tuple(kind.name for kind in all_kinds()) == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_what_is_wrong_with_a_plugin_is_told_in_the_same_way_for_each_kind(name: str, site: Path) -> None:
    kind = find_kind(name)
    broken = {"toy_bad": "1 / 0", "toy_late": "raise AssertionError('imported')"}
    write_distribution(site, "bad", {kind.group: {"toy-bad": "toy_bad"}}, modules=broken)
    for owner in ("one", "two"):
        write_distribution(site, owner, {kind.group: {"toy-twice": "toy_late"}})
    write_distribution(site, "late", {kind.group: {"toy-late": "toy_late"}}, keywords=[f"{kind.api_keyword}99"])
    with pytest.raises(
        UnknownPluginError, match=rf"^x\.y='toy-lat' is not a known {kind.title}; did you mean toy-late"
    ):
        load_plugin(kind, "toy-lat", "x.y")
    with pytest.raises(
        PluginImportError, match=rf"^{kind.title} 'toy-bad' of bad 1\.0 is installed, but .*ZeroDivision"
    ):
        load_plugin(kind, "toy-bad")
    with pytest.raises(DuplicatePluginError, match=r"'toy-twice' is offered by one 1\.0 .* and two 1\.0 "):
        load_plugin(kind, "toy-twice")
    with pytest.raises(PluginApiVersionError, match=rf"written for plugin API 99.* this {kind.owner} has plugin API "):
        load_plugin(kind, "toy-late")


def test_a_kind_of_an_outside_package_is_listed_and_a_broken_one_disturbs_nobody(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from verl_engine import KindSpec\nSPICE = KindSpec('spice', 'toy.spices', 'dish.spice')\n"
    points = {KIND.group: {"spice": "toy_kinds:SPICE", "sauce": "toy_kinds:SPICE", "soup": "toy_gone:SOUP"}}
    write_distribution(site, "toy", {**points, "toy.spices": {"pepper": "toy_pepper"}}, modules={"toy_kinds": text})
    assert run("plugins", "--json") == 0
    rows = {(row["kind"], row["name"]) for row in json.loads(capsys.readouterr().out)}
    assert {("spice", "pepper"), ("kind", "spice"), ("kind", "soup"), ("backend", "fsdp2")} <= rows
    with pytest.raises(HookError, match=r"'sauce' of toy 1\.0: toy_kinds:SPICE must be a KindSpec with name='sauce'"):
        find_kind("sauce")
    assert run("plugins", "--kind", "soup") == 2
    assert (
        "kind of plugin 'soup' of toy 1.0 is installed, but importing toy_gone:SOUP failed" in capsys.readouterr().err
    )
    assert run("plugins", "--kind", "spise") == 2
    assert "--kind='spise' is not a known kind of plugin; did you mean spice?" in capsys.readouterr().err


def test_a_kind_without_a_kit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "timing", "--kind", "observer") == 2
    assert "--kind=observer: no kit proves plugins of this kind; kinds with one: backend" in capsys.readouterr().err


def test_a_plugin_is_proved_by_the_kit_of_its_kind(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
from types import SimpleNamespace as Object
from verl_engine import KindSpec
SPICE = KindSpec("spice", "toy.spices", "dish.spice", kit="toy_kit:Kit")

class Kit:
    def __init__(self, name, settings, *, ranks=3, timeout_s):
        self.version, self.ranks, self.settings = "toy 1.0", ranks, settings

    @staticmethod
    def all_checks():
        return [Object(name=name, proves="It is so.") for name in ("taste/hot", "taste/sweet", "look/red")]

    def run(self, check):
        status = "failed" if check.name == self.settings["fails"] else "passed"
        return Object(check=check, status=status, reason="bland", details="", seconds=0.0)

    def close(self):
        pass
"""
    points = {KIND.group: {"spice": "toy_kit:SPICE"}, "toy.spices": {"pepper": "toy_pepper"}}
    write_distribution(site, "toy", points, modules={"toy_kit": text})
    arguments = ("check", "pepper", "--kind", "spice", "--only", "taste", "--json")
    assert run(*arguments, "fails=taste/hot") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["spice"], report["version"], report["ranks"]) == ("pepper", "toy 1.0", 3)
    assert [entry["check"] for entry in report["failed"] + report["passed"]] == ["taste/hot", "taste/sweet"]
    assert run(*arguments, "--ranks", "1", "fails=look/red") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ranks"] == 1


def test_listing_every_kind_imports_no_plugin_and_no_framework() -> None:
    script = """
import sys
from verl_engine.command.app import main
try:
    main(["plugins", "--json"])
finally:
    heavy = {"torch", "transformers", "ray", "numpy", "pydantic", "pluggy", "rich", "verl_fsdp", "verl_async.ray"}
    print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert {row["kind"] for row in json.loads(done.stdout)} == {*KINDS}
    assert done.stderr == "[]\n"
