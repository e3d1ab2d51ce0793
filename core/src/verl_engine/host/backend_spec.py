"""Check what a backend says of the preparation that it needs, before any of its hooks runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.contract.errors import HookError
from verl_engine.host.preparation.patch_promises import checked_promises

if TYPE_CHECKING:
    from verl_engine.contract.backend import BackendSpec


def check_backend_spec(spec: BackendSpec, label: str) -> None:
    """Check the fields of a SPEC that others than the loader read.

    Raises:
        HookError: one is wrong.
    """
    roots: object = spec.must_precede  # a lone text would be taken letter by letter
    if not (isinstance(roots, tuple) and all(isinstance(root, str) and root for root in roots)):
        raise HookError(f"{label}: SPEC.must_precede={roots!r} must be a tuple of module names, such as ('megatron',)")
    if not callable(spec.patches):
        checked_promises(spec.patches, label)
    unknown = [name for name in spec.process_settings or () if name not in spec.config_class.model_fields]
    if unknown:
        owner = spec.config_class.__name__
        raise HookError(f"{label}: SPEC.process_settings names {', '.join(unknown)}, which {owner} does not have")
