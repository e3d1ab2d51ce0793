"""A plugin that turns out unusable leaves nothing behind, and one that was not chosen disturbs nobody."""

from __future__ import annotations

import importlib
import sys
import zipfile
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

import pluggy
import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine import BackendHost, HookError, PluginImportError, hookimpl
from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.kinds import BACKEND
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.host.catalog import list_plugins
from verl_engine.host.observers import Observer
from verl_engine.host.registration import new_manager, register_backend, register_observer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path


def write_package(site: Path, hooks: str) -> None:
    """Write a plugin of two modules, of which the second imports the first."""
    package = site / "rollpkg"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "config.py").write_text("", encoding="utf-8")
    (package / "hooks.py").write_text(f"import colorsys\nimport rollpkg.config\n{hooks}", encoding="utf-8")
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("broken", "error"),
    [("1 / 0", PluginImportError), ("", HookError), (HOOKS.format(name="other"), HookError)],
)
def test_a_second_try_after_a_fix_meets_no_half_of_the_first(
    site: Path, broken: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # both versions are written within one second
    write_distribution(site, "roll", {BACKENDS_GROUP: {"roll": "rollpkg.hooks"}})
    write_package(site, broken)
    with pytest.raises(error):
        BackendHost.load("roll")
    assert [name for name in sys.modules if name.startswith("rollpkg")] == []
    assert "colorsys" in sys.modules  # of another package: somebody may hold it
    write_package(site, HOOKS.format(name="roll"))
    assert BackendHost.load("roll").spec.name == "roll"


def test_what_was_imported_before_stays(site: Path) -> None:
    write_distribution(site, "roll", {BACKENDS_GROUP: {"roll": "rollpkg.hooks"}})
    write_package(site, "1 / 0")
    package = importlib.import_module("rollpkg")
    with pytest.raises(PluginImportError):
        BackendHost.load("roll")
    assert sys.modules["rollpkg"] is package
    assert not hasattr(package, "config")


def contents(manager: pluggy.PluginManager) -> dict[str, int]:
    relays = {name: relay for name, relay in vars(manager.hook).items() if isinstance(relay, pluggy.HookCaller)}
    return {"plugins": len(manager.get_plugins())} | {
        name: len(relay.get_hookimpls()) for name, relay in relays.items()
    }


class Misfit:
    """One hook fits, the other does not."""

    @hookimpl(wrapper=True)
    def engine_create(self) -> Iterator[None]:
        yield

    @hookimpl(wrapper=True)
    def engine_optimizer_step(self, engin: object) -> Iterator[None]:  # noqa: ARG002 - the slip
        yield


class Unknown(Misfit):
    engine_optimizer_step = None  # type: ignore[assignment]

    @hookimpl(wrapper=True)
    def engine_optimiser_step(self) -> Iterator[None]:
        yield


class Answering(Unknown):
    engine_optimiser_step = None  # type: ignore[assignment]

    @hookimpl
    def engine_gradient_sync(self) -> None: ...


@pytest.mark.parametrize("plugin", [Misfit(), Unknown(), Answering()])
def test_a_failed_registration_leaves_the_manager_as_it_was(plugin: object) -> None:
    manager = new_manager()
    before = contents(manager)
    spec = BackendSpec("toy", EngineConfig, ("cpu",), Capabilities(gaps={"snapshots": "no weights"}))
    for _ in range(2):
        with pytest.raises(HookError):
            register_backend(manager, plugin, spec, "backend 'toy'")
        assert contents(manager) == before
        with pytest.raises(HookError):
            register_observer(manager, Observer("toy", "observer 'toy'", plugin))
        assert contents(manager) == before


def test_a_backend_inside_a_zip_file_is_loaded(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {BACKENDS_GROUP: {"zipped": "zipped_hooks"}}
    write_distribution(site, "Zipped_Engine", points, info="Zipped_Engine-1.0.dist-info")
    archive = tmp_path / "engines.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in site.rglob("*"):
            if path.is_file():
                file.write(path, path.relative_to(site))
        file.writestr("zipped_hooks.py", HOOKS.format(name="zipped"))
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path[1:]])
    host = BackendHost.load("zipped")
    assert host.label == "backend 'zipped' of Zipped_Engine 1.0"
    assert str(archive) in str(sys.modules.pop("zipped_hooks").__file__)


@pytest.mark.parametrize("by_finder", [True, False])
def test_an_editable_backend_is_loaded_from_its_source_tree(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_finder: bool
) -> None:
    """Metadata in site-packages, modules elsewhere: by a path in a .pth file, or by the finder of setuptools."""
    source = tmp_path / "source"
    write_distribution(site, "editable-engine", {BACKENDS_GROUP: {"editable": "editable_hooks"}})
    # The source tree's own egg-info names the same distribution once more.
    write_distribution(
        source,
        "editable_engine",
        {BACKENDS_GROUP: {"editable": "editable_hooks"}},
        modules={"editable_hooks": HOOKS.format(name="editable")},
        info="editable_engine.egg-info",
    )

    class EditableFinder:
        def find_spec(self, name: str, _: Sequence[str] | None = None, __: object = None) -> ModuleSpec | None:
            return PathFinder.find_spec(name, [str(source)]) if name == "editable_hooks" else None

    if by_finder:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder()])
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, str(source)])
    assert BackendHost.load("editable").label == "backend 'editable' of editable-engine 1.0"


def test_broken_plugins_that_were_not_chosen_disturb_nobody(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenFinder:
        def find_spec(self, *_: object) -> None: ...

        def find_distributions(self, _: object) -> None:
            raise RuntimeError("broken finder")

    (site / "broken.zip").write_bytes(b"no zip file")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, BrokenFinder()])
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "broken.zip")])
    write_distribution(site, "bad", {BACKENDS_GROUP: {"bad": "bad_hooks"}}, modules={"bad_hooks": "1 / 0"})
    for name in ("twice-a", "twice-b"):
        write_distribution(site, name, {BACKENDS_GROUP: {"twice": "twice_hooks"}}, keywords=["verl-engine-api-99"])
    binary = write_distribution(site, "binary", {BACKENDS_GROUP: {"binary": "x"}})
    (binary / "METADATA").write_bytes(b"\xff\xfe\x00Name: \x00\n")
    write_distribution(
        site, "toy-engine", {BACKENDS_GROUP: {"toy": " toy_hooks "}}, modules={"toy_hooks": HOOKS.format(name="toy")}
    )
    assert BackendHost.load("toy").spec.name == "toy"
    assert {"bad", "binary", "toy", "twice"} <= {entry.name for entry in list_plugins(BACKEND)}
    assert "bad_hooks" not in sys.modules
