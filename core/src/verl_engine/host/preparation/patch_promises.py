"""What a backend promises to patch, and whether it did: `BackendSpec.patches` at work in one process."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from verl_engine.contract.backend import PatchPromise
from verl_engine.contract.errors import HookError, PatchError
from verl_engine.host.preparation import patch_record
from verl_engine.host.preparation.aliases import find_aliases, inner_function
from verl_engine.host.preparation.first_import import Phase, run_after_import, stop_waiting, waits_for
from verl_engine.host.preparation.import_sites import is_within
from verl_engine.host.preparation.owner import is_preparing, owned_by
from verl_engine.host.preparation.patching import undo
from verl_engine.host.preparation.targets import ABSENT, Target

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from verl_engine.host.preparation.patch_record import How


def checked_promises(promises: object, label: str) -> tuple[PatchPromise, ...]:
    """Check what a backend promises to patch.

    Args:
        promises: ``BackendSpec.patches``, or what it returned for a config.
        label: names the backend in messages.
    Raises:
        HookError: it is no tuple of `PatchPromise`, or one names nothing that can be patched.
    """
    if not isinstance(promises, tuple):
        raise HookError(
            f"{label}: SPEC.patches={promises!r} must be a tuple of PatchPromise, or a function of the config"
        )
    for promise in promises:
        if not isinstance(promise, PatchPromise):
            raise HookError(f"{label}: SPEC.patches holds {promise!r}; write PatchPromise('module:name', 'why')")
        try:
            Target.parse(promise.target)
        except PatchError as error:
            raise HookError(f"{label}: SPEC.patches: {error}") from error
    return promises


class PatchPromises:
    """The promises of one backend. The host sees each original when its module is imported, and compares later."""

    def __init__(self, label: str, promises: Iterable[PatchPromise]) -> None:
        """Read the names; `watch` begins."""
        self._label = label
        self.targets = {Target.parse(promise.target): promise for promise in promises}
        self._is_settled = False
        self._searched: tuple[set[tuple[str, int]], set[int]] = (set(), set())
        """Modules, and originals, that a whole search for stale aliases found nothing in, and of."""

    def watch(self) -> None:
        """Look at the originals: now those of imported modules, and others when they are imported."""
        with owned_by(self._label):
            for module in dict.fromkeys(target.module for target in self.targets):
                mine = [target for target in self.targets if target.module == module]
                run_after_import(module, partial(self._look, mine), Phase.LOOK)
                run_after_import(module, partial(self._check_import, mine), Phase.CHECK)

    def settle(self) -> None:
        """From now on a module that is imported or reloaded must come out patched."""
        self._is_settled = True

    def check(self) -> None:
        """Check that every promise is kept, and that nobody holds an original.

        The search through all modules takes ten times as long as building a small engine. It is made again only where
        a module or an original came in since: only an import can have taken an original, before it was patched.

        Raises:
            PatchError: names each promise that is not, or each stale alias.
        """
        self.check_names()
        modules = {(name, id(module)) for name, module in sys.modules.items()}
        originals = {id(held) for target in self.targets for held in patch_record.replaced_objects(target)}
        if modules <= self._searched[0] and originals <= self._searched[1]:
            return
        stale = self._stale_aliases()
        if stale:
            raise PatchError(
                f"{self._label} patched too late for some: {'; '.join(stale)}. Patch at the first import "
                "(verl_engine.patch) before they take it, or list a module that keeps an original on purpose under "
                "PatchPromise.kept_by"
            )
        self._searched = (modules, originals)

    def check_names(self) -> None:
        """Check the promised names alone.

        Raises:
            PatchError: one holds its original.
        """
        faults = [fault for target in self.targets if (fault := self._fault(target, target.get()))]
        if faults:
            raise PatchError(f"{self._label} did not keep what it promises in BackendSpec.patches: {'; '.join(faults)}")
        for target in self.targets:
            self._record(target)

    def undo(self) -> None:
        """Put every original back that the host knows of, and wait for no more imports."""
        stop_waiting(self._label)
        targets = {*self.targets, *patch_record.forget_plugin(self._label)}
        counts = Counter(id(target.get()) for target in targets)
        shared = {target for target in targets if counts[id(target.get())] > 1}
        for target in targets:
            undo(target, is_shared=target in shared)

    def _look(self, targets: list[Target], module: ModuleType) -> None:
        for target in targets:
            patch_record.note_replaced(target, target.get_in(module))

    def _check_import(self, targets: list[Target], module: ModuleType) -> None:
        if not self._is_settled:  # a patcher that imports first and patches then is at work
            return
        faults = [fault for target in targets if (fault := self._fault(target, target.get_in(module)))]
        if faults or (faults := self._stale_aliases([module.__name__])):
            raise PatchError(
                f"importing {module.__name__} now would leave it unpatched for {self._label}: {'; '.join(faults)}"
            )
        for target in targets:
            self._record(target)

    def _stale_aliases(self, modules: Iterable[str] | None = None) -> list[str]:
        """Say who holds an original; all in one search, which takes a quarter of a second over all modules."""
        owners = {
            id(same): target
            for target in self.targets
            for original in patch_record.replaced_objects(target)
            for same in (original, inner_function(original))
        }
        originals = [original for target in self.targets for original in patch_record.replaced_objects(target)]
        replacements = [target.get() for target in self.targets]
        return [
            f"{alias} holds the original of {target}"
            for alias in find_aliases(originals, replacements, modules)
            for target in [owners[id(alias.held)]]
            if not any(is_within(alias.module, keeper) for keeper in self.targets[target].kept_by)
        ]

    def _fault(self, target: Target, current: object) -> str:
        if current is ABSENT and target.module not in sys.modules:
            if waits_for(target.module, self._label):
                return ""
            return f"{target} is not patched: {target.module} is not imported, and no patch waits for its import"
        if current is ABSENT:
            return f"{target} is not there"
        if any(current is former for former in patch_record.replaced_objects(target)):
            return f"{target} holds its original"
        return ""

    def _record(self, target: Target) -> None:
        known = patch_record.record_of(target)
        reason = self.targets[target].reason
        if target.module not in sys.modules or (known and known.plugin == self._label and known.reason == reason):
            return
        originals = patch_record.replaced_objects(target)
        how: How = "first import" if self._is_settled and not is_preparing() else "preparation"
        original = originals[0] if originals else ABSENT
        patch_record.note_patch(target, self._label, original, target.get(), how, reason)
