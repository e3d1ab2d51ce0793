"""Stale names after MindSpeed, its cache of weights, its arguments, and which package it is: no Megatron needed."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from verl_engine.contract.errors import ConfigError, PatchError
from verl_engine.patching.target import ABSENT, Target
from verl_megatron_mindspeed.mindspeed import adaptor
from verl_megatron_mindspeed.mindspeed.fp8_weights import check_fp8, reset_weight_caches, use_weight_cache
from verl_megatron_mindspeed.mindspeed.packages import MEGATRON_ADAPTOR, MINDSPEED, choose_package, how_to_install
from verl_megatron_mindspeed.mindspeed.patches import ForeignPatch
from verl_megatron_mindspeed.mindspeed.stale_names import fix_stale_names

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = """
class Base:
    def say(self): return "base"
class Layer(Base):
    def say(self): return "original of " + super().say()
def scale(): return "original"
"""


def new_module(monkeypatch: pytest.MonkeyPatch, name: str, code: str, **names: object) -> Any:
    module = ModuleType(name)
    vars(module).update(names)
    exec(code, vars(module))  # noqa: S102 - its own text
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of Megatron's; its class and its function are still the originals."""
    return new_module(monkeypatch, "megatron.layers", LAYERS)


def replace(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: str) -> ForeignPatch:
    """Replace a name as MindSpeed does, by what is defined in one of its modules."""
    original = vars(module).get(name, ABSENT)
    keeper = new_module(monkeypatch, f"mindspeed.{name}", code, original=original)
    monkeypatch.setattr(module, name, keeper.new, raising=False)
    return ForeignPatch(Target(module.__name__, name), original, keeper.new, is_applied=True, owner=module)


def test_other_names_tuples_and_default_arguments_are_fixed(monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
    code = "KINDS = (Layer, str)\ndef use(function=scale): return function()\ntable = {'layer': Layer}\nother = scale"
    user = new_module(monkeypatch, "megatron.user", code, Layer=layers.Layer, scale=layers.scale)
    patches = [
        replace(monkeypatch, layers, "Layer", "class new(original): pass"),
        replace(monkeypatch, layers, "scale", "def new(): return 'patched'"),
    ]
    assert fix_stale_names([], patches) == []
    assert list(user.KINDS) == [layers.Layer, str]
    assert user.table == {"layer": layers.Layer}
    assert user.use() == user.other() == user.scale() == "patched"
    assert sys.modules["mindspeed.Layer"].original is not layers.Layer, "its own modules keep the original"
    assert layers.Layer().say() == "original of base", "and methods of the original still find what is above it"


def test_methods_of_a_replaced_class_that_has_another_name_keep_their_own(
    monkeypatch: pytest.MonkeyPatch, layers: Any
) -> None:
    layers.Old = layers.Layer
    original = layers.Layer
    assert fix_stale_names([], [replace(monkeypatch, layers, "Layer", "class new(original): pass")]) == []
    assert layers.Old is layers.Layer
    assert original().say() == "original of base"


def test_a_name_that_only_borrowed_a_class_leaves_the_class_where_it_is_at_home(
    monkeypatch: pytest.MonkeyPatch, layers: Any
) -> None:
    specs = new_module(monkeypatch, "megatron.specs", "Norm = Layer", Layer=layers.Layer)
    assert fix_stale_names([], [replace(monkeypatch, specs, "Norm", "class new: pass")]) == []
    assert layers.Layer is specs.Layer
    assert specs.Norm is not specs.Layer


def test_what_cannot_be_changed_is_named(monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
    new_module(monkeypatch, "megatron.user", "part = partial(scale)", partial=functools.partial, scale=layers.scale)
    faults = fix_stale_names([], [replace(monkeypatch, layers, "scale", "def new(): pass")])
    assert faults == ["megatron.user:part (in a partial) still holds the original of megatron.layers:scale"]


def test_a_replacement_of_an_earlier_round_is_stale_too(monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
    original = layers.scale
    first = replace(monkeypatch, layers, "scale", "def new(): return 'first'")
    user = new_module(monkeypatch, "megatron.user", "mine = scale", scale=layers.scale)
    second = replace(monkeypatch, layers, "scale", "def new(): return 'second'")
    assert fix_stale_names([first], [second]) == []
    assert user.mine() == "second"
    layers.scale = original  # and where its arguments ask for no patch any longer
    withdrawn = ForeignPatch(first.target, original, original, is_applied=True, owner=layers)
    assert withdrawn.is_withdrawn
    assert fix_stale_names([second], [withdrawn]) == []
    assert user.mine() == "original"


def test_torch_keeps_its_own_and_megatron_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = new_module(monkeypatch, "fake_torch", "def compile(): return 'original'\ninside = compile")
    user = new_module(monkeypatch, "megatron.jit", "fuser = compile", compile=torch.compile)
    assert fix_stale_names([], [replace(monkeypatch, torch, "compile", "def new(): return 'patched'")]) == []
    assert (user.fuser(), torch.inside()) == ("patched", "original")


def test_a_fake_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_module(monkeypatch, "fake_engine", "")
    patch = replace(monkeypatch, engine, "Linear", "class new: pass")
    assert patch.original is ABSENT
    assert patch.is_in_place()
    assert fix_stale_names([], [patch]) == []


def test_the_cache_of_weights_is_forgotten_and_gives_no_weight_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_weight_caches()  # where there is none
    with pytest.raises(ConfigError, match="fp8_reuse_quantized_weight=true, but what is installed has no module"):
        use_weight_cache()
    calls: list[object] = []
    cache = SimpleNamespace(
        clear_weight_quantization_reuse_cache=lambda: calls.append("clear"), set_weight_release_enabled=calls.append
    )
    for name in ("mindspeed", "mindspeed.te", "mindspeed.te.pytorch", "mindspeed.te.pytorch.fp8"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "mindspeed.te.pytorch.fp8.reuse", cache)
    use_weight_cache()
    reset_weight_caches()
    assert calls == [False, "clear"]


def test_arguments_go_back_to_the_defaults_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    full = argparse.Namespace(known=True, left_by_another=2)
    arguments = SimpleNamespace(
        get_full_args=lambda: full, get_mindspeed_args=lambda get_defaults: argparse.Namespace(known=not get_defaults)
    )
    monkeypatch.setitem(sys.modules, "mindspeed", ModuleType("mindspeed"))
    monkeypatch.setitem(sys.modules, MINDSPEED.arguments, arguments)
    adaptor._restore_arguments(MINDSPEED, {"known": True})
    assert vars(full) == {"known": False}
    with pytest.raises(ConfigError, match=r"features\.knwon: mindspeed has no such argument; did you mean known\?"):
        adaptor._restore_arguments(MINDSPEED, {"knwon": True})


@pytest.mark.parametrize(
    ("adaptor_name", "installed", "chosen"),
    [
        ("auto", {"mindspeed", "megatron_adaptor"}, MINDSPEED),
        ("auto", {"megatron_adaptor"}, MEGATRON_ADAPTOR),
        ("megatron_adaptor", {"mindspeed", "megatron_adaptor"}, MEGATRON_ADAPTOR),
        ("megatron_adaptor", {"mindspeed"}, None),
        ("auto", set(), None),
    ],
)
def test_the_package_is_the_one_that_is_asked_for_and_there(
    monkeypatch: pytest.MonkeyPatch, adaptor_name: str, installed: set[str], chosen: object
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.17.2")
    if chosen is not None:
        assert choose_package(adaptor_name) is chosen
        return
    with pytest.raises(PatchError, match=r"installed \(engine\.mindspeed\.adaptor=.* git clone -b core_r0\.17\.0"):
        choose_package(adaptor_name)


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("cause", "is_conflict"),
    [(RuntimeError("the patch of forward exist !"), True), (OSError("libopapi.so: cannot open shared object"), False)],
)
def test_a_failed_repatch_says_what_failed_and_blames_features_only_for_a_conflict(
    cause: Exception, is_conflict: bool
) -> None:
    def repatch(_: object) -> None:
        raise cause

    with pytest.raises(PatchError) as caught:
        adaptor._repatch(MINDSPEED, SimpleNamespace(repatch=repatch), {}, {"moe_alltoall_overlap_comm": True})
    message = str(caught.value)
    assert f"{type(cause).__name__}: {cause} ({__file__}:" in message
    assert ("leave one out of engine.mindspeed.features=['moe_alltoall_overlap_comm']" in message) is is_conflict
    assert ("git clone" in message) is not is_conflict


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("version", "repositories"),
    [
        ("0.16.1", ["MindSpeed"]),
        ("0.17.0", ["MegatronAdaptor", "TransformerEngineNPU", "MindSpeed"]),
        ("1.0.0", ["MegatronAdaptor", "TransformerEngineNPU", "MindSpeed"]),
    ],
)
def test_the_install_line_names_all_packages_of_a_release_in_order(
    monkeypatch: pytest.MonkeyPatch, version: str, repositories: list[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    line = how_to_install()
    assert re.findall(r"pip install -e \./(\w+)", line) == repositories
    assert line.index("pip install triton-ascend") < line.index("git clone")


@pytest.mark.fault(34)
def test_fp8_needs_a_part_of_megatron_that_its_wheel_lacks_unless_layers_come_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = {"megatron": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    monkeypatch.setattr(importlib.util, "find_spec", places.get)
    check_fp8(MINDSPEED, None)
    check_fp8(MEGATRON_ADAPTOR, "e4m3")
    with pytest.raises(ConfigError, match=r"transformer_options\.fp8=e4m3: .* wheel of megatron-core .* lacks"):
        check_fp8(MINDSPEED, "e4m3")
    (tmp_path / "training").mkdir()
    check_fp8(MINDSPEED, "e4m3")
