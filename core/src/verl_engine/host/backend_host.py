"""One backend, loaded and checked, behind one typed method for each hook."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

import pluggy

from verl_engine.contract import hookspecs
from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import HookError
from verl_engine.contract.names import BACKENDS_GROUP, PROJECT_NAME
from verl_engine.host.loading import check_api_version, describe, find_plugin, load_entry

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.base import Engine

REQUIRED_HOOKS: Final = ("engine_create", "engine_gradient_sync", "engine_optimizer_step")


class BackendHost:
    """Holds ONE backend. Two backends in a process, such as actor and reference, are two hosts.

    The inner loop calls hooks thousands of times, so each method keeps its relay, looked up once.
    """

    def __init__(self, spec: BackendSpec, manager: pluggy.PluginManager) -> None:
        """Use `load` or `from_module` instead: they check the backend first."""
        self.spec = spec
        self._manager = manager
        self._prepare_process = manager.hook.engine_prepare_process
        self._create = manager.hook.engine_create
        self._gradient_sync = manager.hook.engine_gradient_sync
        self._optimizer_step = manager.hook.engine_optimizer_step

    def __repr__(self) -> str:
        """Show the backend's name."""
        return f"<{type(self).__name__} of {self.spec.name!r}>"

    @classmethod
    def load(cls, name: str, at: str = "") -> BackendHost:
        """Load an installed backend by name; no other one is imported.

        Args:
            name: the entry point's name in the group ``verl_engine.backends``.
            at: dotted path of the config field that chose it; for messages.
        Raises:
            PluginError: it is not installed, cannot be imported, or its hooks do not fit; see `load_entry`.
        """
        entry = find_plugin(BACKENDS_GROUP, name, at)
        return cls.from_module(load_entry(entry), name, describe(entry), entry.distribution)

    @classmethod
    def from_module(
        cls, module: object, name: str | None = None, described: str = "", distribution: str = ""
    ) -> BackendHost:
        """Check a hooks module and host it.

        Args:
            module: holds ``SPEC`` and the hook implementations.
            name: the name that SPEC must have; by default any.
            described: names the backend in messages.
            distribution: which one offers it, if any.
        Raises:
            HookError: SPEC is missing or wrong, a hook does not fit its hookspec, or a required one is missing.
            PluginApiVersionError: SPEC was written for another plugin API.
        """
        label = described or f"backend {getattr(module, '__name__', module)!r}"
        spec = _checked_spec(module, name, label)
        check_api_version(label, spec.plugin_api_version, distribution)
        manager = pluggy.PluginManager(PROJECT_NAME)
        manager.add_hookspecs(hookspecs)
        _register(manager, module, spec.name, label)
        return cls(spec, manager)

    def prepare_process(self, config: EngineConfig) -> None:
        """Make this process ready; first thing in a worker, before the backend's framework is imported."""
        self._prepare_process(config=config)

    def create(self, config: EngineConfig, model_folder: Path, role: str) -> Engine:
        """Build the engine on this rank; every rank calls it."""
        engine: Engine | None = self._create(config=config, model_folder=model_folder, role=role)
        if engine is None:
            raise self._no_result("engine_create", "an Engine")
        return engine

    def gradient_sync(self, engine: Engine, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward of one micro-batch."""
        context: AbstractContextManager[None] | None = self._gradient_sync(
            engine=engine, is_last_micro_batch=is_last_micro_batch
        )
        if context is None:
            raise self._no_result("engine_gradient_sync", "a context manager")
        return context

    def optimizer_step(self, engine: Engine) -> OptimizerStep:
        """Clip, step and zero the gradient; every rank calls it."""
        step: OptimizerStep | None = self._optimizer_step(engine=engine)
        if step is None:
            raise self._no_result("engine_optimizer_step", "an OptimizerStep")
        return step

    def _no_result(self, hook: str, wanted: str) -> HookError:
        return HookError(f"{hook} of backend {self.spec.name!r} returned None; it must return {wanted}")


def _checked_spec(module: object, name: str | None, label: str) -> BackendSpec:
    spec: object = getattr(module, "SPEC", None)
    if not isinstance(spec, BackendSpec):
        got = "has no SPEC" if spec is None else f"has a SPEC of type {type(spec).__name__}"
        raise HookError(f"{label} {got}; its hooks module must define SPEC = BackendSpec(…)")
    if name is not None and spec.name != name:
        raise HookError(f"{label}: SPEC.name={spec.name!r} must equal the entry point's name {name!r}")
    config_class: object = spec.config_class  # a stranger's: whatever its annotation says
    if not (isinstance(config_class, type) and issubclass(config_class, EngineConfig)):
        raise HookError(f"{label}: SPEC.config_class={config_class!r} must be a subclass of EngineConfig")
    return spec


def _register(manager: pluggy.PluginManager, module: object, name: str, label: str) -> None:
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise HookError(f"{label}: a hook does not fit its hookspec: {error}") from error
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise HookError(_explain_unknown_hook(manager, label)) from error
    missing = [hook for hook in REQUIRED_HOOKS if not getattr(manager.hook, hook).get_hookimpls()]
    if missing:
        unmarked = [hook for hook in missing if hasattr(module, hook)]
        advice = f"; {', '.join(unmarked)} lacks the @hookimpl decorator" if unmarked else ""
        raise HookError(f"{label} lacks required hooks: {', '.join(missing)}{advice}")


def _explain_unknown_hook(manager: pluggy.PluginManager, label: str) -> str:
    """Name every hook that core does not have, and the one that was probably meant."""
    known = [name for name in vars(hookspecs) if name.startswith("engine_")]
    texts = []
    for name, relay in vars(manager.hook).items():
        if isinstance(relay, pluggy.HookCaller) and not relay.has_spec():
            close = difflib.get_close_matches(name, known, n=1)
            texts.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return f"{label} implements hooks that do not exist: {', '.join(texts)}; hooks are: {', '.join(known)}"
