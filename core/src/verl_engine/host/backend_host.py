"""One backend, loaded and checked, behind one typed method for each hook."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import HookError
from verl_engine.contract.kinds import BACKEND
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.host.backend_spec import check_backend_spec, declared_patches
from verl_engine.host.hook_calls import ResultWatch, positional_call
from verl_engine.host.loading import find_plugin, load_entry
from verl_engine.host.observers import Observer, collect_metrics, load_observer
from verl_engine.host.registration import new_manager, register_backend, register_observer
from verl_engine.host.rollback import forgetting_on_failure
from verl_engine.host.spec_check import checked_spec
from verl_engine.patching.first_import import owned_by
from verl_engine.patching.guard import Preparation, prepare, require_preparation
from verl_engine.patching.import_recorder import record_imports

if TYPE_CHECKING:
    from verl_engine.engine.base import Engine
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot


class BackendHost:
    """Holds ONE backend, with the observers around it. Two backends in a process are two hosts.

    The inner loop calls hooks thousands of times, so each method keeps its way to the implementation, looked up once:
    nothing can be registered later.
    """

    def __init__(self, backend: object, spec: BackendSpec, label: str, observers: Sequence[Observer] = ()) -> None:
        """Use `load` or `from_module` instead: they check the backend first."""
        self.spec = spec
        self.label = label
        """Names the backend in messages, with its distribution and version."""
        self._backend = backend
        self._observers = tuple(observers)
        record_imports(spec.must_precede)
        manager = new_manager()
        self.default_hooks = register_backend(manager, backend, spec, label)
        """Names of the hooks that the core fills in, as the backend does not implement them."""
        self._watches: list[ResultWatch] = []
        for observer in observers:
            self._watches.append(ResultWatch(manager))
            register_observer(manager, observer)
        self._prepare_process = manager.hook.engine_prepare_process
        self._create = manager.hook.engine_create
        self._gradient_sync = positional_call(manager.hook.engine_gradient_sync, ("engine", "is_last_micro_batch"))
        self._optimizer_step = positional_call(manager.hook.engine_optimizer_step, ("engine", "learning_rate"))
        self._copy_weights_to_cpu = manager.hook.engine_copy_weights_to_cpu
        self._restore_weights_from_cpu = manager.hook.engine_restore_weights_from_cpu

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.spec.name!r}>"

    @classmethod
    def load(cls, name: str, at: str = "", observers: Sequence[str] = ()) -> BackendHost:
        """Load an installed backend by name, and the observers named, the last outermost; no other plugin is imported.

        `at` is the dotted path of the config field that chose it. A PluginError where one is not installed, cannot be
        imported, or its hooks do not fit, see `load_entry`; then what was imported of it is forgotten.
        """
        entry = find_plugin(BACKEND, name, at)
        with forgetting_on_failure(entry.module):
            _, module, spec = load_entry(entry)
            check_backend_spec(spec, entry.label)
            if not observers:
                return cls(module, spec, entry.label)
        loaded = [load_observer(observer, f"engine.observers[{index}]") for index, observer in enumerate(observers)]
        return cls(module, spec, entry.label, loaded)

    @classmethod
    def from_module(
        cls, module: object, name: str | None = None, observers: Mapping[str, object] | None = None
    ) -> BackendHost:
        """Check a hooks module that holds ``SPEC``, with a name if one is given, and the hooks; and host it.

        Observers are modules or objects with wrappers, by name. A PluginError as of `checked_spec` and
        `register_backend`.
        """
        label = f"backend {getattr(module, '__name__', module)!r}"
        wrapping = [Observer(key, f"observer {key!r}", plugin) for key, plugin in (observers or {}).items()]
        spec = checked_spec(BACKEND, module, name, label)
        check_backend_spec(spec, label)
        return cls(module, spec, label, wrapping)

    def prepare_process(self, config: EngineConfig) -> None:
        """Make this process ready; first thing in a worker, before the backend's framework is imported.

        Harmless when called again with the same settings, also by another host of the same backend.

        Raises:
            ImportOrderError: a module that the backend must precede is imported already.
            PatchError: a declared patch did not take, or somebody still holds an original.
            PreparationConflictError: the process is prepared with other settings, or for one that patches the same.
        """
        hooks = self._prepare_process.get_hookimpls()
        has_hook = any(not (each.wrapper or each.hookwrapper) for each in hooks)
        if has_hook or self.spec.must_precede or self.spec.patches:
            declared = declared_patches(self.spec, config, self.label)
            preparation = Preparation(self._backend, self.label, self.spec, config, declared)
            prepare(preparation, lambda: self._prepare_process(config=config))
        else:
            self._prepare_process(config=config)  # for observers, if any

    def create(self, config: EngineConfig, model_folder: Path, role: str) -> Engine:
        """Build the engine on this rank; every rank calls it.

        An ImportOrderError where the backend depends on a preparation, and there was none in this process; a PatchError
        where modules that came in meanwhile hold an original in the place of a declared patch.
        """
        preparation = require_preparation(self._backend, self.label, self.spec)
        with owned_by(self.label):
            engine: Engine = self._create(config=config, model_folder=model_folder, role=role)
        if preparation is not None:
            preparation.check()
        self._require_result("engine_create", engine, "an Engine")
        return engine

    def gradient_sync(self, engine: Engine, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward of one micro-batch."""
        context: AbstractContextManager[None] = self._gradient_sync(engine, is_last_micro_batch)
        if not hasattr(context, "__exit__"):
            self._require_result("engine_gradient_sync", context, "a context manager", is_right=False)
        return context

    def optimizer_step(self, engine: Engine, learning_rate: float | None = None) -> OptimizerStep:
        """Clip, step at the given rate or the schedule's, and zero the gradient; every rank calls it."""
        step: OptimizerStep = self._optimizer_step(engine, learning_rate)
        self._require_result("engine_optimizer_step", step, "an OptimizerStep")
        return step

    def copy_weights_to_cpu(self, engine: Engine, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Fill a snapshot with this rank's weights; every rank calls it."""
        filled: WeightSnapshot = self._copy_weights_to_cpu(engine=engine, snapshot=snapshot)
        self._require_result("engine_copy_weights_to_cpu", filled, "the snapshot")
        return filled

    def restore_weights_from_cpu(self, engine: Engine, snapshot: WeightSnapshot) -> None:
        """Make a snapshot's weights current again; every rank calls it."""
        is_restored = self._restore_weights_from_cpu(engine=engine, snapshot=snapshot)
        self._require_result("engine_restore_weights_from_cpu", is_restored or None, "True")

    def require(self, feature: str) -> None:
        """Refuse what the backend says it cannot do; see `BackendSpec.require`."""
        self.spec.require(feature)

    def metrics(self) -> dict[str, float]:
        """Return what the observers measured since the last call, each metric under ``observer/metric``."""
        return collect_metrics(self._observers)

    def _require_result(self, hook: str, result: object, wanted: str, *, is_right: bool = True) -> None:
        """Refuse a hook's result where there is none, or is no such thing, and say whose fault that is."""
        label = f"backend {self.spec.name!r}"
        if inspect.iscoroutine(result):
            result.close()  # Python would warn that nobody awaited it
            raise HookError(f"{hook} of {label} returned a coroutine: hooks are not awaited; it must return {wanted}")
        if is_right and result is not None:
            return
        got = "None" if result is None else f"a {type(result).__name__}"
        came_in = [watch.is_there.get(hook) for watch in self._watches]
        for observer, inside, outside in zip(self._observers, came_in, [*came_in[1:], False], strict=False):
            if inside and not outside:
                raise HookError(
                    f"{observer.label} returned {got} from its wrapper of {hook}, in place of what {label} returned; "
                    "an observer returns that: `return (yield)`"
                )
        raise HookError(f"{hook} of {label} returned {got}; it must return {wanted}")
