from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from verl_engine.contract.errors import PatchError
from verl_engine.patching.first_import import owned_by, stop_waiting
from verl_engine.patching.patches import fix_references, forget_records, note_replaced, patch, records, replaced_objects
from verl_engine.patching.references import find_references
from verl_engine.patching.target import ABSENT, Target, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

TEXT = """
FLAG = False
def plain(): return 1
class Holder:
    def method(self): return 2
    @staticmethod
    def static(): return 3
    @classmethod
    def of_class(cls): return 4
class Child(Holder): pass
"""


@pytest.fixture(autouse=True)
def owner() -> Iterator[None]:
    with owned_by("a test"):
        yield
    stop_waiting("a test")
    forget_records("a test")


@pytest.fixture
def module(site: Path) -> ModuleType:
    (site / "patchme.py").write_text(TEXT, encoding="utf-8")
    (site / "patchuser.py").write_text(
        "from patchme import plain as mine\ndef use(function=mine, *, named=mine): return function() + named()\n"
        "class Own:\n    taken = staticmethod(mine)\n    def default(self, function=mine): return function()\n",
        encoding="utf-8",
    )
    return importlib.import_module("patchme")


@pytest.mark.parametrize("text", ["a.b", "a:", ":b", "a:b:c", "a:b c", "", 5])
def test_a_target_is_a_module_and_a_name(text: object) -> None:
    with pytest.raises(PatchError, match="names nothing that can be patched"):
        Target.parse(text)


def test_each_kind_of_name_is_replaced_and_recorded(module: ModuleType) -> None:
    patch("patchme:plain", lambda original: lambda: original() + 10)
    patch("patchme:Holder.method", lambda original: lambda self: original(self) + 10)
    patch("patchme:Holder.static", lambda original: staticmethod(lambda: original.__func__() + 10))
    patch("patchme:Holder.of_class", lambda original: classmethod(lambda cls: original.__func__(cls) + 10))
    patch("patchme:FLAG", lambda original: not original)
    holder = module.Child()
    assert (module.plain(), holder.method(), holder.static(), holder.of_class()) == (11, 12, 13, 14)
    assert module.FLAG is True
    made = [record for record in records() if record.module == "patchme"]
    assert [record.name for record in made] == ["plain", "Holder.method", "Holder.static", "Holder.of_class", "FLAG"]
    assert {(record.plugin, record.how, record.pid > 0) for record in made} == {("a test", "first import", True)}
    assert made[0].original == "<function patchme.plain>"
    assert (made[4].original, made[4].replacement) == ("False", "True")
    assert Target("patchme", "plain").get() is module.plain


def test_what_is_not_there_cannot_be_patched(module: ModuleType) -> None:
    assert module.FLAG is False
    with pytest.raises(PatchError, match="patchme:absent is not there to be patched for a test; is this anoth"):
        patch("patchme:absent", lambda _: None)
    with pytest.raises(PatchError, match="cannot be patched: there is no patchme:Nobody"):
        Target("patchme", "Nobody.x").set(1)
    with pytest.raises(PatchError, match=r"builtins:int\.real cannot be patched: TypeError"):
        Target("builtins", "int.real").set(1)
    assert Target("patchme", "absent").get() is ABSENT


def test_references_are_found_and_fixed(module: ModuleType) -> None:
    user = importlib.import_module("patchuser")
    original = module.plain
    patch("patchme:plain", lambda _: lambda: 10)
    found = {str(reference) for reference in find_references([original]) if reference.module != __name__}
    default = "(a default argument)"
    assert found == {
        "patchuser:mine", "patchuser:Own.taken", f"patchuser:use {default}", f"patchuser:Own.default {default}",
    }  # fmt: skip
    assert len(fix_references("patchme:plain")) == 5
    assert (user.mine(), user.use(), user.Own.taken(), user.Own().default()) == (10, 20, 10, 10)


def test_a_replacement_that_was_replaced_again_is_stale_too(module: ModuleType) -> None:
    patch("patchme:plain", lambda _: lambda: 10)
    between = module.plain
    user = importlib.import_module("patchuser")
    module.__dict__["plain"] = lambda: 11
    note_replaced(Target("patchme", "plain"), between)
    fix_references("patchme:plain")
    assert user.mine() == 11


def test_looking_for_references_asks_no_object_anything(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

    class TouchyModule(type(sys)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    touchy = TouchyModule("touchy")
    touchy.__dict__.update(mine=module.plain, thing=Touchy())
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "touchy", touchy)
        patched.setitem(sys.modules, "no_module", Touchy())
        found = [str(reference) for reference in find_references([module.plain])]
    assert found == ["patchme:plain", "touchy:mine"]


def test_values_without_identity_have_no_references() -> None:
    assert find_references([True, None, 1, "text", ()]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ABSENT, "nothing"),
        (None, "None"),
        (pytest.fixture, "<function _pytest.fixtures.fixture>"),
        (Target, "<class verl_engine.patching.target.Target>"),
        (sys, "<builtins.module object>"),
    ],
)
def test_values_are_shown_by_where_they_come_from(value: object, text: str) -> None:
    assert short_repr(value) == text


HOLDERS = """
import functools
from patchme import Holder, plain
def enclose(function): return lambda: function()
class Registry:
    table = {"plain": plain}
    def __init__(self): self.taken = plain
registry, entries, numbered, pair = Registry(), {"plain": plain}, [plain], (plain,)
closure, part, cached = enclose(plain), functools.partial(plain), functools.lru_cache(plain)
"""


def test_what_holds_a_reference_in_its_turn_is_found_and_fixed_where_it_can_be(module: ModuleType, site: Path) -> None:
    (site / "patchholder.py").write_text(HOLDERS, encoding="utf-8")
    holder = importlib.import_module("patchholder")
    patch("patchme:plain", lambda original: lambda: original() + 10)
    found = {reference.place: reference for reference in find_references(replaced_objects(Target("patchme", "plain")))}
    assert found.keys() == {
        "plain",
        "Registry.table['plain']",
        "registry.taken",
        "entries['plain']",
        "numbered[0]",
        "pair[0]",
        "closure (in its closure)",
        "part (in a partial)",
        "cached (behind a cache)",
    }
    for place in ("Registry.table['plain']", "registry.taken", "entries['plain']", "numbered[0]"):
        found[place].replace(module.plain)
    found["closure (in its closure)"].replace(module.plain)
    taken = (*holder.entries.values(), *holder.Registry.table.values(), holder.registry.taken, *holder.numbered)
    assert all(function is module.plain for function in taken)
    assert holder.closure() == 11
    with pytest.raises(PatchError, match="cannot be changed"):
        found["pair[0]"].replace(module.plain)


def test_a_replacement_may_hold_what_it_replaces(module: ModuleType) -> None:
    original = module.plain
    replacement = functools.partial(original)
    vars(module)["plain"] = replacement
    assert list(map(str, find_references([original]))) == ["patchme:plain (in a partial)"]
    assert find_references([original], [replacement]) == []
