"""Every order of preparing and importing ends wholly patched, or in a refusal that names who came too early."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_framework import is_whole, run_code, run_script, write_framework
from tests.repository import run_python
from verl_engine.host.preparation.importers import describe_importers

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


@pytest.mark.parametrize("style", ["wait", "mend"])
@pytest.mark.parametrize("events", list(itertools.permutations(["prepare", "framework", "third"])), ids="-".join)
def test_every_order_is_whole_or_refused(folder: Path, style: str, events: tuple[str, ...]) -> None:
    answer = run_script(folder, str(folder / "script.py"), style, *events, "create")
    views, refusal = answer["views"], answer["refusal"]
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
    answer = run_script(folder, str(folder / "script.py"), "wait", *events)
    assert is_whole(answer["views"])
    if events[0] == "prepare":
        assert answer["refusal"] == ""
        assert set(answer["views"].values()) == {"patched"}
    elif events[0] == "create":
        assert "creates an engine in a process that it has not prepared; call BackendHost.prep" in answer["refusal"]
        assert answer["views"] == {}
    else:
        assert answer["refusal"].startswith("ImportOrderError: ")


def test_who_imported_before_the_backend_was_loaded_is_found_in_the_sources(folder: Path) -> None:
    code = f"import third\n\nimport fakeframe\n{REFUSED}"
    refusal = run_code(folder, code)["refusal"]
    assert f"imported by third ({folder}/third.py, line 3), which was imported by __main__" in refusal
    code = f"import fakeframe\n\nimport third\n{REFUSED}"
    assert f"imported by __main__ ({folder}/script.py, line 1). Import it later" in run_code(folder, code)["refusal"]


def test_the_chain_of_importers_is_named(folder: Path) -> None:
    (folder / "outer.py").write_text("import third\n", encoding="utf-8")
    refusal = run_code(folder, f"import outer\n{REFUSED}")["refusal"]
    assert (
        f"imported by third ({folder}/third.py, line 3), which was imported by outer ({folder}/outer.py, line 1), "
        f"which was imported by __main__ ({folder}/script.py, line 1). Import it later, or start this backend in a "
    ) in refusal


def test_the_code_of_the_command_line_is_named(folder: Path) -> None:
    refusal = run_script(folder, "-c", f"import fakeframe\n{REFUSED}")["refusal"]
    assert "imported by __main__ (<python -c>, line 1)" in refusal


def test_a_dynamic_import_is_named_and_code_without_source_admitted(folder: Path) -> None:
    code = f"from importlib import import_module\nimport_module('fakeframe.ops')\n{REFUSED}"
    refusal = run_code(folder, code)["refusal"]
    assert f"imported by __main__ ({folder}/script.py, line 2)" in refusal
    refusal = run_code(folder, f"exec('import fake' + 'frame')\n{REFUSED}")["refusal"]
    # The backend's own hook imports it too, but no hook of a backend runs before its preparation.
    assert "there already, imported by code whose source is not at hand or does not name it" in refusal


def test_what_no_source_imports_is_admitted() -> None:
    assert "imported by code whose source is not at hand" in describe_importers("made_up" + "_module")


def test_imports_inside_functions_are_all_named(folder: Path) -> None:
    (folder / "lazy.py").write_text("def use():\n    import fakeframe\n", encoding="utf-8")
    code = f"import lazy\nlazy.use()\ndef other():\n    import fakeframe\n{REFUSED}"
    refusal = run_code(folder, code)["refusal"]
    assert "there already, perhaps imported by " in refusal
    assert f"lazy ({folder}/lazy.py, line 2)" in refusal
    assert f"__main__ ({folder}/script.py, line 4)" in refusal


def test_a_module_inside_a_zip_file_is_named(folder: Path) -> None:
    code = f"""
import sys, zipfile
with zipfile.ZipFile("lib.zip", "w") as file:
    file.writestr("zipped.py", "x = 1\\n" "import fakeframe\\n")
sys.path.insert(0, "lib.zip")
import zipped
{REFUSED}"""
    refusal = run_code(folder, code)["refusal"]
    assert "imported by zipped (lib.zip/zipped.py, line 2), which was imported by __main__" in refusal


def test_a_third_module_at_interpreter_start_is_named(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import third\n", encoding="utf-8")
    refusal = run_code(folder, f"import fakeframe\n{REFUSED}")["refusal"]
    assert f"third ({folder}/third.py, line 3), which was imported by sitecustomize ({folder}/site" in refusal


@pytest.mark.parametrize(
    ("line", "by"), [("import third", "third ("), ("import sys, fakeframe.ops", "Python's start-up (")]
)
def test_a_pth_file_at_interpreter_start_is_named(folder: Path, line: str, by: str) -> None:
    code = (
        "import subprocess, sys, json\n"
        "subprocess.run([sys.executable, '-m', 'venv', '--without-pip', 'env'], check=True)\n"
        "print(json.dumps({}))\n"
    )
    run_code(folder, code)
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    (packages / "start.pth").write_text(f"# comment\n{line}\n", encoding="utf-8")
    refusal = run_code(folder, f"import fakeframe\n{REFUSED}", python=str(folder / "env" / "bin" / "python"))["refusal"]
    assert f"is there already, imported by {by}" in refusal
    assert f"Python's start-up ({packages}/start.pth, line 2)" in refusal


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
