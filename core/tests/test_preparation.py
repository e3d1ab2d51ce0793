"""Preparing once, twice, with other settings, in forked and spawned children, and beside another backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from core.tests.fake_framework import run_code, write_adaptor, write_framework
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from pathlib import Path

TRY = """
from seen import config, host, show
from verl_engine import PluginError

def attempt(*calls):
    for call in calls:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_framework(tmp_path)
    return tmp_path


def test_preparing_twice_is_harmless_also_by_another_host_and_for_another_role(folder: Path) -> None:
    code = f"""{TRY}
host().prepare_process(config())
actor, reference = host(), host()
refusal = attempt(
    lambda: actor.prepare_process(config()),
    lambda: reference.prepare_process(config(seed=5, observers=("timing",))),
    lambda: actor.create(config(), None, "actor"),
    lambda: reference.create(config(seed=5), None, "reference"),
    lambda: actor.prepare_process(config()),
)
from verl_engine.patching.patches import records
show(refusal=refusal, records=len(records()))
"""
    result = run_code(folder, code)
    assert result["refusal"] == ""
    assert set(result["views"].values()) == {"patched"}
    assert result["records"] == 4


def test_preparing_with_other_settings_is_an_error_that_names_them(folder: Path) -> None:
    code = f"""{TRY}
host().prepare_process(config())
show(refusal=attempt(lambda: host().prepare_process(config(width=8, style="fix"))))
"""
    refusal = run_code(folder, code)["refusal"]
    assert refusal.startswith("PreparationConflictError: this process is prepared for backend 'adaptor' of adaptor-eng")
    assert "with engine.style='wait' (now 'fix'), engine.width=4 (now 8); patches cannot be made again" in refusal


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("nothing", "did not patch what it declares in BackendSpec.patches: fakeframe.ops:norm is not patched: fakef"),
        ("import", "patched too late for some: fakeframe.model:norm holds the original of fakeframe.ops:norm; "),
        ("half", "RuntimeError: in the middle"),
    ],
)
def test_a_preparation_that_fails_is_undone_and_spoils_the_process(folder: Path, style: str, message: str) -> None:
    code = f"""{TRY}
import sys
backend = host()
refusal = attempt(lambda: backend.prepare_process(config(style={style!r})))
second = attempt(lambda: backend.prepare_process(config(style="wait")))
third = attempt(lambda: backend.create(config(), None, "actor"))
from verl_engine.patching.patches import records
finders = [type(finder).__name__ for finder in sys.meta_path]
import fakeframe
show(refusal=refusal, second=second, third=third, records=len(records()), finders=finders)
"""
    result = run_code(folder, code)
    assert message in result["refusal"]
    for later in ("second", "third"):
        assert result[later].startswith("PatchError: this process cannot be used for backend 'adaptor' of adaptor-")
        assert "an earlier preparation failed" in result[later]
    assert result["records"] == 0
    assert "_WaitingFinder" not in result["finders"]
    assert set(result["views"].values()) == {"original"}


def test_every_stale_alias_is_named(folder: Path) -> None:
    code = f"{TRY}\nshow(refusal=attempt(lambda: host().prepare_process(config(style='import'))))"
    refusal = run_code(folder, code)["refusal"]
    model = "fakeframe.model"
    places = [f"{model}:norm", f"{model}:run (a default argument)", f"{model}:Model.norm", "fakeframe:norm"]
    assert [place for place in places if f"{place} holds the original of fakeframe.ops:norm" not in refusal] == []
    assert "adaptor" not in refusal.partition("patched too late")[2].partition("Patch at the")[0]


def test_a_module_that_comes_in_later_must_not_bring_the_original_back(folder: Path) -> None:
    code = f"""{TRY}
import importlib, sys
backend = host()
backend.prepare_process(config(style="fix"))
reload = attempt(lambda: importlib.reload(sys.modules["fakeframe.ops"]))
create = attempt(lambda: backend.create(config(), None, "actor"))
show(reload=reload, create=create)
"""
    result = run_code(folder, code)
    assert "importing fakeframe.ops now would leave it unpatched for backend 'adaptor'" in result["reload"]
    assert "fakeframe.ops:norm holds its original" in result["create"]


def test_a_reload_is_patched_again(folder: Path) -> None:
    code = f"""{TRY}
import importlib, sys
backend = host()
backend.prepare_process(config())
import fakeframe
importlib.reload(fakeframe.ops)
show(refusal=attempt(lambda: backend.create(config(), None, "actor")), loader=type(fakeframe.ops.__loader__).__name__)
"""
    result = run_code(folder, code)
    assert set(result["views"].values()) == {"patched"}
    assert result["loader"] == "SourceFileLoader"
    assert result["refusal"] == ""


FORK = """
import multiprocessing

def child(queue, changes):
    from seen import views
    from {module} import attempt
    from seen import config, host
    backend = host()
    refusal = attempt(
        lambda: backend.prepare_process(config(**changes)), lambda: backend.create(config(**changes), None, "actor")
    )
    queue.put({{"refusal": refusal, "views": views()}})

def start(method, changes):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, changes))
    process.start()
    result = queue.get(timeout=30)
    process.join()
    return result
"""


def run_child(folder: Path, parent: str, method: str, changes: dict[str, object]) -> dict[str, object]:
    """Run the parent's code and then the child, and return the child's result."""
    (folder / "attempts.py").write_text(TRY, encoding="utf-8")
    (folder / "children.py").write_text(FORK.format(module="attempts"), encoding="utf-8")
    code = f"""
import json, os
from children import start

if __name__ == "__main__":
    {parent}
    print(json.dumps(start({method!r}, {changes!r}) | {{"pid": os.getpid()}}))
"""
    return run_code(folder, code)


@pytest.mark.parametrize("core_first", [True, False])
def test_a_forked_child_is_refused_for_the_modules_of_its_parent(folder: Path, core_first: bool) -> None:
    parent = "import verl_engine.host.backend_host, fakeframe" if core_first else "import fakeframe"
    result = run_child(folder, parent, "fork", {})
    who = "This process has it from its parent" if core_first else "This process was forked by"
    assert f"imported before this backend was loaded; held by __main__. {who}" in str(result["refusal"])
    assert f"process {result['pid']}, which" in str(result["refusal"])
    assert "start this process by spawn or forkserver" in str(result["refusal"])
    assert "patched" not in result["views"]  # type: ignore[operator]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_that_start_afresh_do_not_care_what_the_parent_imported(folder: Path, method: str) -> None:
    result = run_child(folder, "import fakeframe", method, {})
    assert result["refusal"] == ""
    assert set(result["views"].values()) == {"patched"}  # type: ignore[attr-defined]


PREPARED = "from seen import config, host; host().prepare_process(config())"


@pytest.mark.parametrize("parent", [PREPARED, f"{PREPARED}; import fakeframe"])
def test_a_forked_child_takes_over_its_parents_preparation(folder: Path, parent: str) -> None:
    result = run_child(folder, parent, "fork", {"seed": 3})
    assert result["refusal"] == ""
    assert set(result["views"].values()) == {"patched"}  # type: ignore[attr-defined]


def test_a_forked_child_with_other_settings_is_refused(folder: Path) -> None:
    result = run_child(folder, PREPARED, "fork", {"width": 5})
    assert str(result["refusal"]).startswith(
        f"PreparationConflictError: this process was forked by process {result['pid']}, which was prepared for backend"
    )


def test_a_second_backend_that_must_precede_what_the_first_imported_is_refused(folder: Path) -> None:
    write_adaptor(folder, "other", ("fakeframe.model",))
    code = f"""{TRY}
first = host()
first.prepare_process(config())
first.create(config(), None, "actor")
show(refusal=attempt(lambda: host("other").prepare_process(config())))
"""
    result = run_code(folder, code)
    assert result["refusal"].startswith("PreparationConflictError: backend 'other' of other-engine 1.0 patches fakef")
    hooks = (folder / "other_hooks.py").read_text(encoding="utf-8").replace("fakeframe.ops:", "elsewhere:")
    (folder / "other_hooks.py").write_text(hooks, encoding="utf-8")
    refusal = run_code(folder, code)["refusal"]
    assert refusal.startswith("ImportOrderError: backend 'other' of other-engine 1.0 must prepare the process before")
    assert (
        "while backend 'adaptor' of adaptor-engine 1.0 was prepared or created in this process. The two cannot share a "
        "process in this order: prepare this backend first, or"
    ) in refusal


def test_two_backends_with_nothing_in_common_share_a_process(folder: Path) -> None:
    points = {BACKENDS_GROUP: {"toy": "toy_hooks"}}
    write_distribution(folder, "toy", points, modules={"toy_hooks": HOOKS.format(name="toy")})
    code = f"""{TRY}
reference = host("toy")
backend = host()
refusal = attempt(
    lambda: backend.prepare_process(config()),
    lambda: reference.prepare_process(config()),
    lambda: reference.create(config(), None, "reference"),
    lambda: backend.create(config(), None, "actor"),
)
show(refusal=refusal)
"""
    result = run_code(folder, code)
    assert result["refusal"] == ""
    assert set(result["views"].values()) == {"patched"}


def test_a_module_that_keeps_its_own_original_cannot_be_imported(folder: Path) -> None:
    ops = folder / "fakeframe" / "ops.py"
    ops.write_text(f"{ops.read_text(encoding='utf-8')}\nTABLE = {{'norm': norm}}\n", encoding="utf-8")
    code = f"""{TRY}
host().prepare_process(config())
show(refusal=attempt(lambda: __import__("fakeframe")))
"""
    result = run_code(folder, code)
    assert "importing fakeframe.ops now would leave it unpatched for backend 'adaptor'" in result["refusal"]
    assert "fakeframe.ops:TABLE['norm'] holds the original of fakeframe.ops:norm" in result["refusal"]
    assert result["views"] == {}
