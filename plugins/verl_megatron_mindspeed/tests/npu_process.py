"""Run code in a process that believes to be on an NPU, with the `fakes` in place of what is only there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from tests.repository import ROOT, run_python

FAKES: Final = Path(__file__).parent / "fakes"

HANDLER: Final = """
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.optimizer import get_megatron_optimizer as make
def build(make_optimizer=make): return make_optimizer
"""
"""A module of somebody else's that takes Megatron's names for its own, as a handler of snapshots did."""

PRELUDE: Final = """
import json, sys
from verl_engine import BackendHost, EngineError
from verl_engine.contract.validation import validate

FRAMEWORKS = ("megatron", "mindspeed", "megatron_adaptor", "torch_npu", "mbridge", "transformer_engine", "apex")
backend = BackendHost.load("megatron")

def config(**changes):
    section = {"backend": "megatron", "device": "npu", "param_dtype": "bfloat16", **changes}
    return validate(backend.spec.config_class, section, at="engine")

def loaded(): return sorted(root for root in FRAMEWORKS if root in sys.modules)

def views():
    "What Megatron decided, and what others took from it: patched or not."
    if "megatron.core.optimizer" not in sys.modules: return {}
    import torch
    import megatron.core.extensions.transformer_engine as layers
    import megatron.core.optimizer as optimizer
    from megatron.core import fp8_utils, jit
    from megatron.core.transformer.transformer_config import TransformerConfig
    handler = sys.modules.get("snapshot_handler")
    return {
        "HAVE_TE": layers.HAVE_TE,
        "Adam": optimizer.Adam is not torch.optim.AdamW,
        "jit": jit.jit_fuser.__module__ == "mindspeed.features",
        "tuple": [kind.__module__ for kind in fp8_utils.TE_LINEAR_TYPES][:1] == ["mindspeed.features"],
        "config": hasattr(TransformerConfig.__init__, "__wrapped__"),
        **({"handler": hasattr(handler.build(), "__wrapped__")} if handler else {}),
    }

def attempt(action):
    "The refusal, and what it came from."
    try:
        action()
    except EngineError as error:
        return {"error": type(error).__name__, "text": str(error), "cause": repr(error.__cause__)}
    return {}
"""


def run_npu(folder: Path, code: str, *fakes: str, **environment: str) -> dict[str, Any]:
    """Run code after the prelude; return the dict that it leaves in ``result``.

    Args:
        folder: gets the script, and the handler.
        code: calls what the prelude has.
        fakes: folders of fakes, by name or path.
        environment: of the process, beyond this one's.
    """
    (folder / "snapshot_handler.py").write_text(HANDLER, encoding="utf-8")
    script = folder / "script.py"
    script.write_text(f"{PRELUDE}\n{code}\nprint('\\n' + json.dumps(result))\n", encoding="utf-8")
    path = os.pathsep.join([str(folder), *(str(FAKES / name) for name in fakes), os.environ.get("PYTHONPATH", "")])
    done = run_python(str(script), "--job", "-q", folder=ROOT, PYTHONPATH=path.rstrip(os.pathsep), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return result
