"""What a backend patches, found by preparing a fresh process for it.

``python -m verl_engine.command.doctor.patch_report NAME JSON`` is that process.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_engine.contract.errors import EngineError
from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.patching.first_import import waiting_modules
from verl_engine.patching.patches import PatchRecord, records


@dataclass(frozen=True, slots=True)
class PatchReport:
    """How the preparation of a process for one backend went."""

    backend: str
    patches: tuple[PatchRecord, ...] = ()
    """What was patched, in order; empty for most backends."""
    waiting: tuple[str, ...] = ()
    """Modules that will be patched when they are first imported."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """What the backend declares to patch in them: name and reason."""
    error: str = ""
    """Class and message of what made it fail; empty where it did not."""


def describe_patches(backend: str, section: Mapping[str, Any] | None = None, timeout_s: float = 120.0) -> PatchReport:
    """Prepare a fresh process for a backend, and report what was patched there, or what failed.

    It may import its framework, in up to `timeout_s`; by default with an ``engine`` section of defaults.
    """
    # The process must find what this one finds, wherever it was started.
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    try:
        done = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", __name__, backend, json.dumps(dict(section or {}))],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return PatchReport(backend, error=f"the preparation was not done after {timeout_s:g} s")
    try:
        result = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError:  # it died, by a signal say
        words = done.stderr.strip()[-2000:]
        return PatchReport(backend, error=f"the process ended with exit code {done.returncode} and no report: {words}")
    patches = tuple(PatchRecord(**record) for record in result["patches"])
    return PatchReport(**{**result, "patches": patches, "waiting": tuple(result.get("waiting", ()))})


def main() -> None:
    """Prepare this process for the backend of the first argument, and print one JSON object as the last line."""
    backend, section = sys.argv[1], json.loads(sys.argv[2])
    sys.argv[1:] = []  # some frameworks read the arguments of whoever imports them
    found: dict[str, Any] = {"backend": backend}
    with contextlib.redirect_stdout(sys.stderr):
        try:
            host = BackendHost.load(backend)
            config = validate(host.spec.config_class, {"backend": backend, **section}, at="engine")
            host.prepare_process(config)
            waiting = found["waiting"] = waiting_modules(host.label)
            declared = [(patch.target, patch.reason) for patch in host.spec.declared_patches(config)]
            found["declared"] = {name: why for name, why in declared if name.partition(":")[0] in waiting}
        except Exception as failure:  # noqa: BLE001 - a plugin's hook can raise anything, and the report must say so
            by = "" if isinstance(failure, EngineError) else " (raised by engine_prepare_process)"
            found["error"] = f"{type(failure).__name__}: {failure}{by}"
    found["patches"] = [asdict(record) for record in records()]
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # no framework's own clean-up may spoil the exit code, or hang


if __name__ == "__main__":
    main()
