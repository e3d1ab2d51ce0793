"""A small framework that takes its own names by from-import, as frameworks do, and a backend that must patch it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from core.tests.fake_distributions import write_distribution
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FRAMEWORK = {
    "__init__": "from fakeframe.ops import norm\nfrom fakeframe import model\n",
    "ops": """
HAVE_FAST = False

def norm():
    return "original"

class Layer:
    def forward(self):
        return "original"

    @staticmethod
    def kind():
        return "original"
""",
    "model": """
from fakeframe.ops import Layer, norm

def run(function=norm):
    return function()

class Model:
    norm = staticmethod(norm)
""",
}

HOOKS = """
from contextlib import nullcontext
from typing import Literal
from verl_engine import BackendSpec, Capabilities, EngineConfig, OptimizerStep, DeclaredPatch, hookimpl

class AdaptorConfig(EngineConfig):
    style: Literal["wait", "import", "fix", "nothing", "half"] = "wait"
    width: int = 4

SPEC = BackendSpec(
    name={name!r},
    config_class=AdaptorConfig,
    devices=("cpu",),
    capabilities=Capabilities(gaps={{"snapshots": "a list has no weights"}}),
    plugin_api_version=2,
    must_precede={must_precede!r},
    patches=(
        DeclaredPatch("fakeframe.ops:norm", "the original is slow"),
        DeclaredPatch("fakeframe.ops:Layer.forward", "the original is slow"),
        DeclaredPatch("fakeframe.ops:Layer.kind", "the original is slow"),
        DeclaredPatch("fakeframe.ops:HAVE_FAST", "it is there now"),
    ),
    process_settings=("style", "width"),
)

@hookimpl
def engine_prepare_process(config):
    import adaptor_patches
    getattr(adaptor_patches, config.style if config.style != "import" else "import_first")()

@hookimpl
def engine_create(config, model_folder, role):
    import fakeframe
    return [role]

@hookimpl
def engine_gradient_sync(engine, is_last_micro_batch):
    return nullcontext()

@hookimpl
def engine_optimizer_step(engine):
    return OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)
"""

PATCHES = '''
import sys
from verl_engine import patch
from verl_engine.patching.patches import fix_references

def wrap(original):
    def patched(*_):
        return original(*_).replace("original", "patched")
    return patched

def wait():
    """Each name right after the import of its module."""
    patch("fakeframe.ops:norm", wrap)
    patch("fakeframe.ops:Layer.forward", wrap)
    patch("fakeframe.ops:Layer.kind", lambda original: staticmethod(wrap(original.__func__)))
    patch("fakeframe.ops:HAVE_FAST", lambda original: True)

def import_first():
    """As a patcher of someone else's does it, that knows nothing of references."""
    import fakeframe.ops as ops
    ops.norm = wrap(ops.norm)
    ops.Layer.forward = wrap(ops.Layer.forward)
    ops.Layer.kind = staticmethod(wrap(ops.Layer.kind))
    ops.HAVE_FAST = True

def fix():
    """The same with all references fixed."""
    import_first()
    assert len(fix_references("fakeframe.ops:norm")) == 4

def nothing():
    """Patches nothing of what it declares."""

def half():
    wait()
    import fakeframe
    raise RuntimeError("in the middle")
'''

VIEWS = '''
import json, sys

def views():
    """What each place that can be seen gives: original or patched."""
    found = {}
    if "fakeframe.ops" in sys.modules:
        ops = sys.modules["fakeframe.ops"]
        found |= {"ops": ops.norm(), "layer": ops.Layer().forward(), "kind": ops.Layer.kind()}
        found["flag"] = "patched" if ops.HAVE_FAST else "original"
    if "fakeframe.model" in sys.modules:
        model = sys.modules["fakeframe.model"]
        found |= {"package": sys.modules["fakeframe"].norm(), "alias": model.norm(), "default": model.run()}
        found["class"] = model.Model.norm()
    if "third" in sys.modules:
        found["third"] = sys.modules["third"].taken()
    return found

def config(**changes):
    from adaptor_hooks import AdaptorConfig
    return AdaptorConfig(backend="adaptor", learning_rate=0.1, **changes)

def host(name="adaptor", **options):
    from verl_engine import BackendHost
    return BackendHost.load(name, **options)

def show(**more):
    print(json.dumps({"views": views(), **more}))
'''


def write_framework(folder: Path) -> None:
    """Write the framework, a third module that uses it, the backend ``adaptor``, and ``seen`` for scripts."""
    package = folder / "fakeframe"
    package.mkdir(parents=True)
    for name, text in FRAMEWORK.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "third.py").write_text("import json\n\nfrom fakeframe.ops import norm as taken\n", encoding="utf-8")
    (folder / "seen.py").write_text(VIEWS, encoding="utf-8")
    write_adaptor(folder, "adaptor", ("fakeframe",))


def write_adaptor(folder: Path, name: str, must_precede: tuple[str, ...]) -> None:
    """Write a backend that patches the framework."""
    write_distribution(
        folder,
        f"{name}-engine",
        {BACKENDS_GROUP: {name: f"{name}_hooks"}},
        modules={f"{name}_hooks": HOOKS.format(name=name, must_precede=must_precede), "adaptor_patches": PATCHES},
    )


def run_script(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run Python in a process of its own that finds the framework; return the JSON object of its last line."""
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [environment.pop("python", sys.executable), *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return result


def run_code(folder: Path, code: str, **environment: str) -> dict[str, Any]:
    """Run code as a script; line 1 is its first line."""
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    return run_script(folder, str(script), **environment)


def is_whole(views: Mapping[str, str]) -> bool:
    """Whether the framework is patched everywhere, or nowhere."""
    return len(set(views.values())) <= 1
