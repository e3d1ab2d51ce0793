from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from verl_engine.contract.errors import PatchError
from verl_engine.patching.first_import import owned_by, patch_on_import, stop_waiting
from verl_engine.patching.patches import patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(autouse=True)
def owner() -> Iterator[None]:
    """Everything that a test leaves waiting goes with it."""
    with owned_by("a test"):
        yield
    stop_waiting("a test")
    assert not any(type(finder).__name__ == "_WaitingFinder" for finder in sys.meta_path)


@pytest.fixture
def package(site: Path) -> Path:
    folder = site / "waitpkg"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("value = 1\nfrom waitpkg.ops import value as taken\n", encoding="utf-8")
    (folder / "ops.py").write_text("value = 2\nloader = type(__loader__).__name__\n", encoding="utf-8")
    (folder / "broken.py").write_text("import sys\nif getattr(sys, 'waitpkg_is_broken', True): 1 / 0\nvalue = 3\n")
    (folder / "inner" / "deep.py").write_text("value = 4\n", encoding="utf-8")
    return folder


def double(module: ModuleType) -> None:
    module.__dict__["value"] *= 10


@pytest.mark.usefixtures("package")
def test_nobody_sees_the_module_without_its_patch() -> None:
    patch_on_import("waitpkg.ops", double)
    package = importlib.import_module("waitpkg")
    ops = sys.modules["waitpkg.ops"]
    assert (package.value, package.taken, ops.value) == (1, 20, 20)
    assert ops.loader == type(ops.__loader__).__name__ == "SourceFileLoader"  # the real one, from its first line on
    assert ops.__spec__ is not None
    assert ops.__spec__.loader is ops.__loader__


@pytest.mark.usefixtures("package")
def test_a_module_that_is_imported_already_is_patched_at_once_and_again_after_a_reload() -> None:
    ops = importlib.import_module("waitpkg.ops")
    patch_on_import("waitpkg.ops", double)
    assert ops.value == 20
    assert importlib.reload(ops).value == 20
    del sys.modules["waitpkg.ops"]
    assert importlib.import_module("waitpkg.ops").value == 20


@pytest.mark.usefixtures("package")
def test_a_failed_import_is_patched_when_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_on_import("waitpkg.broken", double)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("waitpkg.broken")
    assert "waitpkg.broken" not in sys.modules
    monkeypatch.setattr(sys, "waitpkg_is_broken", False, raising=False)
    assert importlib.import_module("waitpkg.broken").value == 30


@pytest.mark.usefixtures("package")
def test_a_failing_patch_makes_the_import_fail_each_time() -> None:
    def fail(_: ModuleType) -> None:
        raise PatchError("no")

    patch_on_import("waitpkg.ops", fail)
    for _ in range(2):
        with pytest.raises(PatchError):
            importlib.import_module("waitpkg.ops")
        assert "waitpkg.ops" not in sys.modules


@pytest.mark.usefixtures("package")
def test_patches_run_in_order_and_may_ask_for_more_of_the_same_module() -> None:
    calls: list[str] = []

    def first(module: ModuleType) -> None:
        calls.append("first")
        patch_on_import("waitpkg.ops", lambda _: calls.append("asked for by the first"))
        double(module)

    patch_on_import("waitpkg.ops", first)
    patch_on_import("waitpkg.ops", lambda _: calls.append("second"))
    assert importlib.import_module("waitpkg.ops").value == 20
    assert calls == ["first", "asked for by the first", "second"]


def test_a_namespace_package_and_a_module_in_a_zip_file_are_patched(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (package / "inner" / "__init__.py").exists()
    seen: list[str] = []
    patch_on_import("waitpkg.inner", lambda module: seen.append(module.__name__))
    patch_on_import("waitpkg.inner.deep", double)
    assert importlib.import_module("waitpkg.inner.deep").value == 40
    assert seen == ["waitpkg.inner"]
    assert "Namespace" in type(sys.modules["waitpkg.inner"].__loader__).__name__

    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as file:
        file.writestr("waitzip.py", "value = 5\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib.zip"), *sys.path])
    patch_on_import("waitzip", double)
    assert importlib.import_module("waitzip").value == 50
    del sys.modules["waitzip"]


@pytest.mark.usefixtures("package")
def test_a_finder_that_asks_all_others_does_not_patch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking:
        asking = False

        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if self.asking or not name.startswith("waitpkg"):
                return None
            self.asking = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking = False

    monkeypatch.setattr(sys, "meta_path", [Asking(), *sys.meta_path])
    patch_on_import("waitpkg.ops", double)
    assert importlib.import_module("waitpkg.ops").value == 20
    stop_waiting("a test")


@pytest.mark.usefixtures("package")
def test_looking_for_a_module_patches_nothing_and_an_absent_one_is_absent() -> None:
    seen: list[ModuleType] = []
    patch_on_import("waitpkg", seen.append)
    patch_on_import("no_such_module", seen.append)
    assert importlib.util.find_spec("waitpkg") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert seen == []


def test_a_module_that_puts_another_object_into_its_place_is_patched_there(site: Path) -> None:
    text = "import sys, types\nother = types.ModuleType(__name__)\nother.value = 7\nsys.modules[__name__] = other\n"
    (site / "waitother.py").write_text(text, encoding="utf-8")
    patch_on_import("waitother", double)
    assert importlib.import_module("waitother").value == 70
    del sys.modules["waitother"]


def test_a_module_in_the_middle_of_its_import_is_refused(site: Path) -> None:
    (site / "waitself.py").write_text(
        "from verl_engine import patch_on_import\npatch_on_import(__name__, print)\n", encoding="utf-8"
    )
    with pytest.raises(PatchError, match="waitself is just being imported"):
        importlib.import_module("waitself")


@pytest.mark.usefixtures("package")
def test_a_module_that_is_run_by_hand_is_patched_and_the_imported_one_is_left_alone() -> None:
    patch("waitpkg.ops:value", lambda value: value * 10)
    ops = importlib.import_module("waitpkg.ops")
    spec = importlib.util.find_spec("waitpkg.ops")
    assert spec is not None
    fresh = sys.meta_path[0].find_spec("waitpkg.ops", sys.modules["waitpkg"].__path__)
    assert fresh is not None
    private = importlib.util.module_from_spec(fresh)
    assert fresh.loader is not None
    fresh.loader.exec_module(private)
    assert (private.value, ops.value) == (20, 20)
    assert sys.modules["waitpkg.ops"] is ops
