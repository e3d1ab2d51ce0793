"""Only what was chosen is imported: what a process holds after a command, seen from a fresh process."""

from __future__ import annotations

import json

from tests.repository import run_python

HEAVY = ("torch", "transformers", "ray", "tensorboard", "matplotlib", "pandas")
SHOW = f"""
import json, sys
def show():
    print("LOADED", json.dumps(sorted(name for name in sys.modules if name in {HEAVY!r} or name.startswith("verl_"))))
"""


def loaded_after(code: str) -> list[str]:
    done = run_python("-c", f"{SHOW}\n{code}\nshow()")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    modules: list[str] = json.loads(line.removeprefix("LOADED "))
    return modules


def test_validating_a_job_needs_nothing_heavy() -> None:
    code = """
from pathlib import Path
from verl_async.job import load_train_job
import verl_async.preflight
load_train_job(Path("examples/addition_grpo.yaml"), [])
"""
    loaded = loaded_after(code)
    assert [name for name in HEAVY if name in loaded] == []
    assert "verl_fsdp.hooks" in loaded
    assert "verl_fsdp.engine" not in loaded


def test_a_job_without_its_backend_imports_no_backend() -> None:
    loaded = loaded_after("import verl_async.job, verl_engine.host.backend_host")
    assert [name for name in loaded if name.startswith("verl_fsdp")] == []


def test_core_imports_no_plugin() -> None:
    loaded = loaded_after("import verl_engine.engine.worker, verl_engine.batch.packed, verl_engine.host.backend_host")
    assert [name for name in loaded if not name.startswith("verl_engine") and name.startswith("verl_")] == []
    assert "ray" not in loaded
