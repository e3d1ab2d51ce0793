"""Every order of preparing and importing ends wholly patched, or in a refusal that names who came too early."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_framework import is_whole, run_code, run_script, write_framework
from tests.repository import run_python

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
from seen import config, host, show
from verl_engine import PluginError

style, events = sys.argv[1], sys.argv[2:]
backend = host()  # who imports the framework from now on is seen

def prepare(): backend.prepare_process(config(style=style))
def create(): backend.create(config(style=style), None, "actor")
def framework(): import fakeframe
def submodule(): import fakeframe.ops
def third(): import third
def again(): prepare()

refusal = ""
try:
    for event in events:
        globals()[event]()
except PluginError as error:
    refusal = f"{type(error).__name__}: {error}"
show(refusal=refusal)
"""
TOO_EARLY = {"framework": ("__main__", 11), "third": ("third", 3)}
"""Who the refusal names, and which line."""


REFUSED = (
    "from seen import config, host, show\ntry:\n    host().prepare_process(config())\n    show(refusal='')\n"
    "except Exception as error:\n    show(refusal=str(error))\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_framework(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("style", ["wait", "fix"])
@pytest.mark.parametrize("events", list(itertools.permutations(["prepare", "framework", "third"])), ids="-".join)
def test_every_order_is_whole_or_refused(folder: Path, style: str, events: tuple[str, ...]) -> None:
    result = run_script(folder, str(folder / "script.py"), style, *events, "create")
    views, refusal = result["views"], result["refusal"]
    assert is_whole(views)
    if events[0] == "prepare":
        assert refusal == ""
        assert set(views.values()) == {"patched"}
        assert len(views) == 9
    else:
        assert "patched" not in views.values()
        importer, line = TOO_EARLY[events[0]]
        assert refusal.startswith("ImportOrderError: backend 'adaptor' of adaptor-engine 1.0 must prepare the process")
        assert "before fakeframe is imported, but fakeframe is there already, imported by " in refusal
        file = folder / ("third.py" if importer == "third" else "script.py")
        assert f"imported by {importer} ({file}, line {line})" in refusal


@pytest.mark.parametrize("events", list(itertools.permutations(["prepare", "submodule", "create"])), ids="-".join)
def test_creating_needs_the_preparation_first(folder: Path, events: tuple[str, ...]) -> None:
    result = run_script(folder, str(folder / "script.py"), "wait", *events)
    assert is_whole(result["views"])
    if events[0] == "prepare":
        assert result["refusal"] == ""
        assert set(result["views"].values()) == {"patched"}
    elif events[0] == "create":
        assert "creates an engine in a process that it has not prepared; call BackendHost.prep" in result["refusal"]
        assert result["views"] == {}
    else:
        assert result["refusal"].startswith("ImportOrderError: ")


@pytest.mark.parametrize(
    ("imports", "holders"),
    [
        ("import third", "held by third."),
        ("import third, fakeframe", "held by __main__, third."),
        ("from fakeframe.ops import Layer as layer", "held by __main__."),
        ("exec('import fake' + 'frame')", "held by __main__."),
        ("import importlib; importlib.import_module('fakeframe.ops')", "no module holds it, so a function, exec() or "),
    ],
)
def test_what_was_imported_before_the_backend_was_loaded_is_told_by_who_holds_it(
    folder: Path, imports: str, holders: str
) -> None:
    refusal = run_code(folder, f"{imports}\n{REFUSED}")["refusal"]
    assert "but fakeframe is there already, imported before this backend was loaded; " in refusal
    assert holders in refusal


def test_of_many_holders_the_first_are_named(folder: Path) -> None:
    for index in range(7):
        (folder / f"holder_{index}.py").write_text("import fakeframe.ops as ops\n", encoding="utf-8")
    imports = "\n".join(f"import holder_{index}" for index in range(7))
    refusal = run_code(folder, f"{imports}\n{REFUSED}")["refusal"]
    assert "held by holder_0, holder_1, holder_2, holder_3, holder_4 and 2 more. Import it later, or start" in refusal


def test_who_asks_whether_it_is_there_did_not_import_it(folder: Path) -> None:
    code = """
from seen import config, host, show
from importlib.util import find_spec
backend = host()
find_spec("fakeframe")
import third
try:
    backend.prepare_process(config())
except Exception as error:
    show(refusal=str(error))
"""
    assert f"imported by third ({folder}/third.py, line 3)." in run_code(folder, code)["refusal"]


def test_a_name_nobody_may_import_is_not_imported(folder: Path) -> None:
    code = f"import sys\nsys.modules['fakeframe'] = None\n{REFUSED}"
    assert run_code(folder, code)["refusal"] == ""


def test_the_workers_import_no_framework() -> None:
    frameworks = ["megatron", "mindspeed", "transformer_engine", "apex", "torch_npu", "transformers", "vllm"]
    code = f"""
import json, sys
import verl_engine.engine.worker
from verl_engine import BackendHost
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import list_plugins
try:
    import verl_async.ray.trainer
except ModuleNotFoundError as error:
    assert error.name in ("ray", "verl_async"), error
hosts = [BackendHost.load(entry.name) for entry in list_plugins(BACKEND) if not entry.missing]
roots = [root for host in hosts for root in host.spec.must_precede]
print(json.dumps({{"loaded": [name for name in {{*roots, *{frameworks!r}}} if name in sys.modules]}}))
"""
    done = run_python("-c", code)
    assert done.stdout.strip().endswith('{"loaded": []}'), done.stdout + done.stderr
    assert "fakeframe" not in sys.modules
