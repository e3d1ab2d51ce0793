from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine.contract.errors import (
    DuplicatePluginError,
    PluginApiVersionError,
    PluginImportError,
    UnknownPluginError,
)
from verl_engine.contract.kinds import BACKEND, COMMAND, KIND, OBSERVER, KindSpec
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.host.install_hints import pip_install
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from pathlib import Path

GROUP = "fake.things"
THING = KindSpec("thing", GROUP, "engine.thing")
PLAIN = [THING, OBSERVER, COMMAND, KIND]


def test_a_module_or_an_attribute_is_loaded_and_nothing_else_imported(site: Path) -> None:
    write_distribution(
        site,
        "toy",
        {GROUP: {"module": "toy_module", "attribute": "toy_module:Outer.inner", "other": "toy_other"}},
        modules={"toy_module": "class Outer:\n    inner = 5\n", "toy_other": "raise RuntimeError"},
    )
    assert load_plugin(THING, "attribute").plugin == 5
    assert load_plugin(THING, "module").plugin is sys.modules["toy_module"]
    assert "toy_other" not in sys.modules


def test_an_unknown_name_gives_the_closest_ones_and_all_installed(site: Path) -> None:
    write_distribution(site, "toy", {GROUP: {"tinker": "x", "toyota": "y"}})
    with pytest.raises(
        UnknownPluginError, match=r"'tinkre' is not a known .*; did you mean tinker\?; installed: tinker, toyota$"
    ):
        load_plugin(THING, "tinkre")


def test_the_config_field_is_named() -> None:
    with pytest.raises(UnknownPluginError, match=r"^engine\.thing='x' is not a known .*; no thing is"):
        load_plugin(THING, "x", at="engine.thing")


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        (BACKEND, "fsdp2", "verl-fsdp"),
        (KIND, "rollout", "verl-async"),
        (COMMAND, "train", "verl-async"),
    ],
)
def test_one_of_ours_that_is_not_installed_gives_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: KindSpec, name: str, distribution: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UnknownPluginError, match=rf"{name}' is not installed.*: python -m pip install {distribution}$"):
        load_plugin(kind, name)


def test_a_slip_in_one_of_our_names_gives_the_command_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        UnknownPluginError,
        match=r"did you mean fsdp \(not installed: python -m pip install verl-fsdp\) or fsdp2 ",
    ):
        load_plugin(BACKEND, "FSDP")


def test_one_of_ours_that_an_old_version_lacks_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "verl-fsdp", {BACKENDS_GROUP: {"fsdp0": "x"}}, version="0.0.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UnknownPluginError, match=r"not in verl-fsdp 0\.0\.1; .* --upgrade verl-fsdp"):
        load_plugin(BACKEND, "fsdp2")


@pytest.mark.parametrize(
    ("value", "text", "cause"),
    [
        ("toy_bad", "import no_such_module_at_all", ModuleNotFoundError),
        ("toy_bad", "def broken(:", SyntaxError),
        ("toy_bad", "1 / 0", ZeroDivisionError),
        ("toy_bad", "raise SystemExit(0)", SystemExit),
        ("toy_bad:absent", "", AttributeError),
        ("toy_nowhere", "", ModuleNotFoundError),
    ],
)
def test_a_failing_import_is_no_unknown_plugin(site: Path, value: str, text: str, cause: type[BaseException]) -> None:
    write_distribution(
        site, "toy-bad", {GROUP: {"toy": value}}, version="3.1", modules={"toy_bad": text}, requires=["no-such>=1"]
    )
    with pytest.raises(PluginImportError) as caught:
        load_plugin(THING, "toy")
    assert isinstance(caught.value.__cause__, cause)
    message = str(caught.value)
    assert f"'toy' of toy-bad 3.1 is installed, but importing {value} failed: {cause.__name__}: " in message
    assert message.endswith('; install what it needs: python -m pip install "no-such>=1"')
    assert "toy_bad" not in sys.modules or ":" in value


def test_two_distributions_with_one_name_are_both_named(site: Path) -> None:
    for name in ("toy-a", "toy-b"):
        write_distribution(site, name, {GROUP: {"toy": "toy_x"}}, modules={"toy_x": ""})
    with pytest.raises(DuplicatePluginError, match=r"'toy' is offered by toy-a 1\.0 .* and toy-b 1\.0 .*uninstall"):
        load_plugin(THING, "toy")
    assert "toy_x" not in sys.modules


@pytest.mark.parametrize(("version", "upgrade"), [(0, "toy"), (9, "verl-engine-core")])
def test_another_plugin_api_is_refused_before_the_import(site: Path, version: int, upgrade: str) -> None:
    write_distribution(
        site, "toy", {GROUP: {"toy": "toy_x"}}, modules={"toy_x": ""}, keywords=[f"verl-engine-api-{version}"]
    )
    advice = re.escape(pip_install("--upgrade", upgrade))  # of the core from where it came: a checkout here
    with pytest.raises(PluginApiVersionError, match=rf"written for plugin API {version},.* {advice}$"):
        load_plugin(THING, "toy")
    assert "toy_x" not in sys.modules


def test_metadata_that_pydantic_cannot_read_disturbs_nobody(tmp_path: Path) -> None:
    broken = write_distribution(tmp_path, "broken-dist", {})
    (broken / "entry_points.txt").write_text("[some.group]\nno equals sign\n", encoding="utf-8")
    write_distribution(tmp_path, "toy", {BACKENDS_GROUP: {"toy": "toy_x"}}, modules={"toy_x": HOOKS.format(name="toy")})
    done = subprocess.run(
        [sys.executable, "-c", "from verl_engine import BackendHost; print(BackendHost.load('toy'))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "<BackendHost of 'toy'>", done.stderr
