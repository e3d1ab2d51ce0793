from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine import BackendHost, BackendSpec, Capabilities, DeclaredPatch, EngineConfig, OptimizerStep, hookimpl
from verl_engine.contract.errors import (
    ConfigError,
    HookError,
    PluginApiVersionError,
    UnknownPluginError,
    UnsupportedError,
)
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_SNAPSHOTS = Capabilities(gaps={"snapshots": "a list has no weights"})
SPEC = BackendSpec(name="toy", config_class=EngineConfig, devices=("cpu",), capabilities=NO_SNAPSHOTS)
CONFIG = EngineConfig(backend="toy", learning_rate=0.1)
STEP = OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)


def make_module(**changes: object) -> ModuleType:
    """Make a complete hooks module whose engine is a list that records its calls; None leaves a name out."""

    @hookimpl
    def engine_create(config: EngineConfig, model_folder: Path, role: str) -> list[object]:
        return [config.backend, model_folder, role]

    @hookimpl
    def engine_gradient_sync(engine: list[object], is_last_micro_batch: bool) -> AbstractContextManager[None]:
        engine.append(is_last_micro_batch)
        return nullcontext()

    @hookimpl
    def engine_optimizer_step(engine: list[object]) -> OptimizerStep:
        engine.append("step")
        return STEP

    names: dict[str, object] = {
        "SPEC": SPEC,
        "engine_create": engine_create,
        "engine_gradient_sync": engine_gradient_sync,
        "engine_optimizer_step": engine_optimizer_step,
    }
    module = ModuleType("toy_hooks")
    for name, value in {**names, **changes}.items():
        if value is not None:
            setattr(module, name, value)
    return module


def test_each_hook_is_called_through_its_method() -> None:
    prepared: list[EngineConfig] = []

    @hookimpl
    def engine_prepare_process(config: EngineConfig) -> None:
        prepared.append(config)

    host = BackendHost.from_module(make_module(engine_prepare_process=engine_prepare_process), "toy")
    host.prepare_process(CONFIG)
    engine = host.create(CONFIG, Path("model"), "actor")
    with host.gradient_sync(engine, is_last_micro_batch=False):
        pass
    assert host.optimizer_step(engine) is STEP
    assert prepared == [CONFIG]
    assert cast("list[object]", engine) == ["toy", Path("model"), "actor", False, "step"]
    assert host.spec is SPEC
    assert repr(host) == "<BackendHost of 'toy'>"


def test_weights_are_copied_and_restored_through_their_hooks() -> None:
    @hookimpl
    def engine_copy_weights_to_cpu(engine: list[object], snapshot: list[object]) -> list[object]:
        return [*snapshot, *engine]

    @hookimpl
    def engine_restore_weights_from_cpu(engine: list[object], snapshot: list[object]) -> bool | None:
        engine[:] = snapshot
        return True if snapshot else None

    spec = replace(SPEC, capabilities=Capabilities())
    hooks = {
        "engine_copy_weights_to_cpu": engine_copy_weights_to_cpu,
        "engine_restore_weights_from_cpu": engine_restore_weights_from_cpu,
    }
    host = BackendHost.from_module(make_module(SPEC=spec, **hooks))
    engine, snapshot = cast("Any", [1]), cast("Any", [2])
    assert cast("Any", host.copy_weights_to_cpu(engine, snapshot)) == [2, 1]
    host.restore_weights_from_cpu(engine, snapshot)
    assert engine == [2]
    with pytest.raises(HookError, match="engine_restore_weights_from_cpu of backend 'toy' returned None"):
        host.restore_weights_from_cpu(engine, cast("Any", []))
    with pytest.raises(UnsupportedError, match=r"^engine\.backend=toy cannot do 'snapshots': a list has no weights$"):
        BackendHost.from_module(make_module()).require("snapshots")
    host.require("snapshots")


def test_preparing_the_process_is_optional() -> None:
    BackendHost.from_module(make_module()).prepare_process(CONFIG)


def test_two_hosts_do_not_see_each_other() -> None:
    first, second = (BackendHost.from_module(make_module()) for _ in range(2))
    engine = first.create(CONFIG, Path("model"), "actor")
    second.create(CONFIG, Path("model"), "reference")
    first.optimizer_step(engine)
    assert cast("list[object]", engine)[2:] == ["actor", "step"]


def _bare(*_: object, **__: object) -> None:
    """A hook without its decorator."""


@hookimpl
def _engine_optimizer_step_with_a_wrong_argument(engin: object) -> None:
    """A hook that does not fit."""


@hookimpl
def _engine_optimizer_step_with_a_default(engine: object, learning_rate: float | None = None) -> None:
    """A hook whose second argument would never be passed."""


@hookimpl(specname="engine_optimizer_step")
def _another_step(engine: object) -> None:
    """A second implementation."""


@hookimpl
def _engine_optimiser_step(engine: object) -> None:
    """A hook with a wrong name."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SPEC": None}, r"'toy_hooks' has no SPEC; .*must define SPEC = BackendSpec"),
        ({"SPEC": {"name": "toy"}}, "has a SPEC of type dict"),
        (
            {"SPEC": BackendSpec(name="toi", config_class=EngineConfig, devices=("cpu",))},
            r"SPEC\.name='toi' must equal the entry point's name 'toy'",
        ),
        (
            {"SPEC": BackendSpec(name="toy", config_class=cast("Any", dict), devices=("cpu",))},
            r"SPEC\.config_class=<class 'dict'> must be a subclass of EngineConfig",
        ),
        (
            {"engine_create": None, "engine_optimizer_step": None},
            "lacks the required hook engine_create$",
        ),
        ({"another_step": _another_step}, "implements engine_optimizer_step twice"),
        (
            {"engine_optimizer_step": _engine_optimizer_step_with_a_default},
            "engine_optimizer_step gives learning_rate a default; the core passes every argument",
        ),
        ({"SPEC": replace(SPEC, must_precede=cast("Any", "megatron"))}, "must_precede='megatron' must be a tuple"),
        ({"SPEC": replace(SPEC, patches=cast("Any", ("a:b",)))}, "patches holds 'a:b'; write DeclaredPatch"),
        ({"SPEC": replace(SPEC, patches=(DeclaredPatch("a.b", "why"),))}, "patches: 'a.b' names nothing that can be"),
        ({"SPEC": replace(SPEC, patches=cast("Any", 5))}, "patches=5 must be a tuple"),
        ({"SPEC": replace(SPEC, process_settings=("width",))}, "process_settings names width, which EngineConfig does"),
        ({"engine_create": _bare}, "engine_create lacks the @hookimpl decorator, and would not be called"),
        ({"engine_optimizer_step": _engine_optimizer_step_with_a_wrong_argument}, "does not fit .*engin"),
        (
            {"engine_optimiser_step": _engine_optimiser_step},
            r"hooks that do not exist: engine_optimiser_step \(did you mean engine_optimizer_step\?\)",
        ),
    ],
)
def test_a_module_that_is_no_backend_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(HookError, match=message):
        BackendHost.from_module(make_module(**changes), "toy")


def test_a_spec_for_another_plugin_api_is_refused() -> None:
    spec = BackendSpec(name="toy", config_class=EngineConfig, devices=("cpu",), plugin_api_version=9)
    with pytest.raises(PluginApiVersionError, match="plugin API 9, but this verl-engine-core has plugin API 2"):
        BackendHost.from_module(make_module(SPEC=spec), "toy")


class _Engine:
    """Notes which of its methods the default hooks call."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        self.calls.append(is_last_micro_batch)
        return nullcontext()

    def optimizer_step(self, learning_rate: float | None) -> OptimizerStep:
        self.calls.append(learning_rate)
        return STEP

    def local_weights(self) -> str:
        return "weights"


class _Snapshot:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def store(self, weights: str) -> _Snapshot:
        self.calls.append(f"store {weights}")
        return self

    def copy_into(self, weights: str) -> None:
        self.calls.append(f"copy into {weights}")


def test_hooks_that_a_backend_does_not_write_are_the_engines_methods() -> None:
    host = BackendHost.from_module(make_module(engine_gradient_sync=None, engine_optimizer_step=None))
    engine: Any = _Engine()
    snapshot: Any = _Snapshot()
    with host.gradient_sync(engine, is_last_micro_batch=True):
        pass
    assert host.optimizer_step(engine) is STEP
    assert host.optimizer_step(engine, 0.5) is STEP
    assert engine.calls == [True, None, 0.5]
    copied: Any = host.copy_weights_to_cpu(engine, snapshot)
    host.restore_weights_from_cpu(engine, snapshot)
    assert copied.calls == ["store weights", "copy into weights"]


def test_a_hook_that_returns_nothing_never_falls_through_to_the_default() -> None:
    @hookimpl
    def engine_optimizer_step(engine: _Engine, learning_rate: float | None) -> None:
        engine.optimizer_step(learning_rate)

    host = BackendHost.from_module(make_module(engine_optimizer_step=engine_optimizer_step))
    engine = _Engine()
    with pytest.raises(HookError, match=r"engine_optimizer_step .* an OptimizerStep"):
        host.optimizer_step(cast("Any", engine))
    assert engine.calls == [None]
    assert host.default_hooks == {"engine_copy_weights_to_cpu", "engine_restore_weights_from_cpu"}


def test_a_backend_may_wrap_a_default() -> None:
    @hookimpl(wrapper=True)
    def engine_optimizer_step(engine: _Engine) -> Iterator[None]:
        engine.calls.append("before")
        return (yield)

    host = BackendHost.from_module(make_module(engine_optimizer_step=engine_optimizer_step))
    engine = _Engine()
    assert host.optimizer_step(cast("Any", engine), 0.1) is STEP
    assert engine.calls == ["before", 0.1]


@hookimpl
def _engine_create_nothing(role: str) -> None:
    """Forgot its return."""


@hookimpl
def _engine_gradient_sync_nothing(engine: object) -> None:
    """Forgot its return."""


@hookimpl
def _engine_optimizer_step_nothing(engine: object) -> None:
    """Forgot its return."""


def test_a_hook_that_returns_nothing_is_named() -> None:
    host = BackendHost.from_module(
        make_module(
            engine_create=_engine_create_nothing,
            engine_gradient_sync=_engine_gradient_sync_nothing,
            engine_optimizer_step=_engine_optimizer_step_nothing,
        )
    )
    engine = cast("Any", [])
    with pytest.raises(HookError, match="engine_create of backend 'toy' returned None; it must return an Engine"):
        host.create(CONFIG, Path("model"), "actor")
    with pytest.raises(HookError, match=r"engine_gradient_sync .* a context manager"):
        host.gradient_sync(engine, is_last_micro_batch=True)
    with pytest.raises(HookError, match=r"engine_optimizer_step .* an OptimizerStep"):
        host.optimizer_step(engine)


def test_an_installed_backend_is_loaded_by_name(site: Path) -> None:
    write_distribution(
        site,
        "toy-engines",
        {BACKENDS_GROUP: {"toy1": "toy1_hooks", "toy2": "toy2_hooks"}},
        modules={"toy1_hooks": HOOKS.format(name="toy1"), "toy2_hooks": "raise RuntimeError"},
        keywords=["verl-engine-api-2"],
    )
    assert BackendHost.load("toy1").spec.name == "toy1"
    assert "toy2_hooks" not in sys.modules


def test_an_installed_backend_is_named_with_its_distribution(site: Path) -> None:
    write_distribution(
        site, "toy-engines", {BACKENDS_GROUP: {"toy1": "toy1_hooks"}}, modules={"toy1_hooks": HOOKS.format(name="toy2")}
    )
    with pytest.raises(HookError, match=r"backend 'toy1' of toy-engines 1\.0: SPEC\.name='toy2'"):
        BackendHost.load("toy1")


def test_an_unknown_backend_names_the_field() -> None:
    with pytest.raises(UnknownPluginError, match=r"^actor\.backend='qqqqq' is not a known backend"):
        BackendHost.load("qqqqq", at="actor.backend")


class _Failing(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_a_module_that_cannot_be_asked_is_refused_with_the_cause() -> None:
    with pytest.raises(HookError, match="looking up SPEC failed: RuntimeError: SPEC") as caught:
        BackendHost.from_module(_Failing("failing_hooks"))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (None, r"SPEC\.patches=None must be a tuple"),
        (("a:b",), r"SPEC\.patches holds 'a:b'"),
        ((DeclaredPatch("a", "why"),), r"SPEC\.patches: 'a' names nothing that can be patched"),
        (ZeroDivisionError("no"), r"SPEC\.patches\(config\) failed: ZeroDivisionError: no"),
    ],
)
def test_declared_patches_that_depend_on_the_config_are_checked_too(declared: object, message: str) -> None:
    def patches(_: EngineConfig) -> Any:
        if isinstance(declared, Exception):
            raise declared
        return declared

    host = BackendHost.from_module(make_module(SPEC=replace(SPEC, patches=patches)))
    with pytest.raises(HookError, match=message):
        host.prepare_process(CONFIG)


def test_a_config_that_promises_refuse_is_refused_as_it_says() -> None:
    def patches(_: EngineConfig) -> Any:
        raise ConfigError("device='npu' is not available on this machine")

    host = BackendHost.from_module(make_module(SPEC=replace(SPEC, patches=patches)))
    with pytest.raises(ConfigError, match="is not available on this machine"):
        host.prepare_process(CONFIG)


def test_a_plugin_api_version_that_is_no_number_is_refused() -> None:
    spec = replace(SPEC, plugin_api_version=cast("int", "1"))
    with pytest.raises(HookError, match=r"SPEC\.plugin_api_version='1' must be a whole number"):
        BackendHost.from_module(make_module(SPEC=spec))
