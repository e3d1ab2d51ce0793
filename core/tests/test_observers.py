from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine import BackendHost, ConfigError, EngineConfig, HookError, UnknownPluginError, validate_engine_section
from verl_engine.contract.names import BACKENDS_GROUP, OBSERVERS_GROUP
from verl_engine.host.timing import Timing

COUNTING = """
from verl_engine import hookimpl
seen = []

@hookimpl(wrapper=True)
def engine_create(role):
    engine = yield
    seen.append(role)
    return engine

@hookimpl(wrapper=True)
def engine_gradient_sync(is_last_micro_batch):
    seen.append(is_last_micro_batch)
    return (yield)

@hookimpl(wrapper=True)
def engine_optimizer_step():
    step = yield
    seen.append("step")
    return step

def metrics():
    return {"calls": len(seen)}
"""
REPLACING = "from verl_engine import hookimpl\n@hookimpl\ndef engine_optimizer_step(engine):\n    return None\n"
WRAPPING = REPLACING.replace("hookimpl\ndef", "hookimpl(wrapper=True)\ndef").replace("return None", "return (yield)")
MISFIT = WRAPPING.replace("(engine)", "(engin)")
SWALLOWING = WRAPPING.replace("return (yield)", "yield")
ASYNC = "from verl_engine import hookimpl\n@hookimpl(wrapper=True)\nasync def engine_create(): yield\n"
FAILING = "class Observer:\n    def __init__(self):\n        raise RuntimeError('no')\n"
WRONG_METRICS = f"{COUNTING}\ndef metrics():\n    return 5\n"
CONFIG = EngineConfig(backend="toy", learning_rate=0.1)


@pytest.fixture
def toy(site: Path) -> Path:
    write_distribution(
        site, "toy-engine", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": HOOKS.format(name="toy")}
    )
    observers = {"counting": "obs_counting", "replacing": "obs_replacing", "misfit": "obs_misfit"}
    observers |= {"swallowing": "obs_swallowing", "passing": "obs_passing", "async": "obs_async"}
    observers |= {"failing": "obs_failing:Observer", "empty": "obs_empty", "wrong_metrics": "obs_wrong_metrics"}
    modules = {
        "obs_counting": COUNTING,
        "obs_replacing": REPLACING,
        "obs_misfit": MISFIT,
        "obs_failing": FAILING,
        "obs_empty": "",
        "obs_swallowing": SWALLOWING,
        "obs_passing": WRAPPING,
        "obs_async": ASYNC,
        "obs_wrong_metrics": WRONG_METRICS,
    }
    write_distribution(site, "toy-observers", {OBSERVERS_GROUP: observers}, version="2.0", modules=modules)
    return site


def run_step(host: BackendHost) -> list[object]:
    engine = host.create(CONFIG, Path("model"), "actor")
    for is_last in (False, True):
        with host.gradient_sync(engine, is_last_micro_batch=is_last):
            pass
    assert host.optimizer_step(engine).applied
    return cast("list[object]", engine)


@pytest.mark.usefixtures("toy")
def test_an_observer_that_is_not_named_is_not_imported() -> None:
    host = BackendHost.load("toy")
    assert run_step(host) == ["actor", False, True]
    assert host.metrics() == {}
    assert [name for name in sys.modules if name.startswith("obs_")] == []


@pytest.mark.usefixtures("toy")
def test_an_observer_wraps_every_call_and_adds_its_metrics() -> None:
    host = BackendHost.load("toy", observers=("counting",))
    assert run_step(host) == ["actor", False, True]
    assert sys.modules["obs_counting"].seen == ["actor", False, True, "step"]
    assert host.metrics() == {"counting/calls": 4.0}
    assert [name for name in sys.modules if name.startswith("obs_")] == ["obs_counting"]


@pytest.mark.usefixtures("toy")
def test_each_host_has_an_observer_of_its_own_and_the_last_named_is_outermost() -> None:
    first, second = (BackendHost.load("toy", observers=("counting", "timing")) for _ in range(2))
    run_step(first)
    assert first.metrics()["timing/engine_create_s"] > 0
    assert second.metrics()["timing/engine_create_s"] == 0


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("replacing", r"observer 'replacing' of toy-observers 2\.0 would implement engine_optimizer_step in the b"),
        ("misfit", r"observer 'misfit' of toy-observers 2\.0: a hook does not fit its hookspec: .*engin"),
        ("failing", r"observer 'failing' of toy-observers 2\.0: obs_failing:Observer\(\) failed: RuntimeError: no"),
        ("async", r"observer 'async' of toy-observers 2\.0: a hook does not fit its hookspec: Plugin 'observer as"),
        ("empty", r"observer 'empty' of toy-observers 2\.0 wraps no hook; mark its functions with @hookimpl\(wrapper"),
    ],
)
def test_what_is_no_observer_is_refused(name: str, message: str) -> None:
    with pytest.raises(HookError, match=message):
        BackendHost.load("toy", observers=(name,))


@pytest.mark.fault(30)
@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("others", [("swallowing",), ("passing", "swallowing"), ("swallowing", "timing", "passing")])
def test_an_observer_that_swallows_a_result_is_named_and_not_the_backend(others: tuple[str, ...]) -> None:
    host = BackendHost.load("toy", observers=others)
    engine = host.create(CONFIG, Path("model"), "actor")
    with pytest.raises(
        HookError,
        match=r"^observer 'swallowing' of toy-observers 2\.0 returned None from its wrapper of engine_opt",
    ):
        host.optimizer_step(engine)


@pytest.mark.fault(30)
@pytest.mark.parametrize("observers", [{}, {"timing": Timing()}])
def test_a_backend_that_returns_nothing_is_guilty_itself(observers: dict[str, object]) -> None:
    module = _module()
    module.engine_optimizer_step.__code__ = (lambda engine: None).__code__  # noqa: ARG005 - the hook's argument
    host = BackendHost.from_module(module, observers=observers)
    with pytest.raises(HookError, match=r"^engine_optimizer_step of backend 'toy' returned None; it must return an"):
        host.optimizer_step([])  # type: ignore[arg-type] # the toy's engine is a list


@pytest.mark.fault(30)
def test_hooks_are_called_without_await() -> None:
    text = HOOKS.format(name="toy")
    asynchronous = _module(text.replace("def engine_gradient_sync", "async def engine_gradient_sync"))
    with pytest.raises(HookError, match="engine_gradient_sync is `async def`, and hooks are called without await"):
        BackendHost.from_module(asynchronous)
    wrapped = "async def sync(): ...\n" + text.replace("return nullcontext()", "return sync()")
    host = BackendHost.from_module(_module(wrapped))
    with pytest.raises(HookError, match="engine_gradient_sync of backend 'toy' returned a coroutine: hooks are not"):
        host.gradient_sync([], is_last_micro_batch=True)  # type: ignore[arg-type] # as above


@pytest.mark.usefixtures("toy")
def test_metrics_must_be_numbers_by_name() -> None:
    host = BackendHost.load("toy", observers=("wrong_metrics",))
    with pytest.raises(HookError, match=r"'wrong_metrics' of toy-observers 2\.0: metrics\(\) must return a dict of"):
        host.metrics()


@pytest.mark.usefixtures("toy")
def test_an_unknown_observer_gives_the_closest_name_before_anything_starts() -> None:
    section = {"backend": "toy", "learning_rate": 0.1, "observers": ["timing", "countign"]}
    with pytest.raises(
        UnknownPluginError, match=r"^engine\.observers\[1\]='countign' is not a known observer; did you mean counting\?"
    ):
        validate_engine_section(section)
    assert validate_engine_section({**section, "observers": ["timing"]}).observers == ("timing",)
    with pytest.raises(UnknownPluginError, match=r"^engine\.observers\[0\]='countign' is not a known observer"):
        BackendHost.load("toy", observers=("countign",))


@pytest.mark.usefixtures("toy")
def test_naming_an_observer_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^engine: observers=\['timing', 'timing'\] names one twice"):
        validate_engine_section({"backend": "toy", "learning_rate": 0.1, "observers": ["timing", "timing"]})


def test_metrics_that_cannot_be_had_name_the_observer() -> None:
    observer = Timing()
    observer.metrics = lambda: {"share": 1 / 0}  # type: ignore[method-assign]
    host = BackendHost.from_module(_module(), observers={"odd": observer})
    with pytest.raises(HookError, match=r"observer 'odd': metrics\(\) must .*: ZeroDivisionError: division by zero"):
        host.metrics()


def test_timing_measures_hooks_their_context_and_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("verl_engine.host.timing.perf_counter", lambda: float(next(clock)))
    timing = Timing()
    host = BackendHost.from_module(_module(), observers={"timing": timing})
    engine = host.create(CONFIG, Path("model"), "actor")  # reads the clock at 0 and 1
    for is_last in (False, True):  # the hook 1 s, entering 1 s, inside 1 s, leaving 1 s
        with host.gradient_sync(engine, is_last):
            pass
    host.optimizer_step(engine)
    assert host.metrics() == {
        "timing/engine_prepare_process_s": 0.0,
        "timing/engine_create_s": 1.0,
        "timing/engine_gradient_sync_s": 6.0,
        "timing/forward_backward_s": 2.0,
        "timing/engine_optimizer_step_s": 1.0,
    }
    assert host.metrics()["timing/forward_backward_s"] == 0.0


def test_timing_lets_exceptions_through_and_leaves_the_context() -> None:
    host = BackendHost.from_module(_module(), observers={"timing": Timing()})
    engine = host.create(CONFIG, Path("model"), "actor")
    with pytest.raises(ZeroDivisionError), host.gradient_sync(engine, is_last_micro_batch=True):
        raise ZeroDivisionError
    assert host.metrics()["timing/engine_gradient_sync_s"] > 0


def _module(text: str = HOOKS.format(name="toy")) -> Any:
    from types import ModuleType

    module = ModuleType("toy_hooks")
    exec(text, vars(module))  # noqa: S102 - the fake backend's own text
    return module
