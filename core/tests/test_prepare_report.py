from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from core.tests.fake_framework import write_framework
from verl_engine.command.doctor.patch_report import describe_patches
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_framework(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return tmp_path / "site"


@pytest.mark.usefixtures("framework")
def test_what_is_patched_at_once_is_listed_with_its_reason() -> None:
    report = describe_patches("adaptor", {"style": "fix"})
    assert report.error == ""
    names = ["norm", "Layer.forward", "Layer.kind", "HAVE_FAST"]
    assert [(record.module, record.name) for record in report.patches] == [("fakeframe.ops", name) for name in names]
    first = report.patches[0]
    assert (first.plugin, first.reason) == ("backend 'adaptor' of adaptor-engine 1.0", "the original is slow")
    assert (first.original, first.how) == ("<function fakeframe.ops.norm>", "preparation")
    assert report.waiting == ()
    assert "fakeframe" not in sys.modules


@pytest.mark.usefixtures("framework")
def test_what_waits_for_an_import_is_listed() -> None:
    report = describe_patches("adaptor")
    assert (report.patches, report.waiting, report.error) == ((), ("fakeframe.ops",), "")
    assert report.declared["fakeframe.ops:norm"] == "the original is slow"


@pytest.mark.usefixtures("framework")
@pytest.mark.parametrize(
    ("backend", "section", "message"),
    [
        ("adaptor", {"style": "nothing"}, "PatchError: backend 'adaptor' of adaptor-engine 1.0 did not patch"),
        ("adaptor", {"style": "half"}, "RuntimeError: in the middle (raised by engine_prepare_process)"),
        ("adaptor", {"style": "x"}, "ConfigError: engine.style='x'"),
        ("adaptorr", {}, "UnknownPluginError: backend 'adaptorr' is not a known backend; did you mean adaptor?"),
    ],
)
def test_what_fails_is_in_the_report(backend: str, section: dict[str, str], message: str) -> None:
    assert describe_patches(backend, section).error.startswith(message)


def test_a_backend_that_kills_the_process_or_prints_is_reported(site: Path) -> None:
    hook = "\n@hookimpl\ndef engine_prepare_process():\n    import os\n"
    dying = f"{HOOKS.format(name='toy')}{hook}    os.write(2, b'last words')\n    os._exit(3)\n"
    loud = f"{HOOKS.format(name='loud')}{hook}    print('x')\n    os.write(1, b'y')\n"
    write_distribution(
        site,
        "toys",
        {BACKENDS_GROUP: {"toy": "toy_hooks", "loud": "loud_hooks"}},
        modules={"toy_hooks": dying, "loud_hooks": loud},
    )
    assert describe_patches("toy").error == "the process ended with exit code 3 and no report: last words"
    assert describe_patches("loud").error == ""
    assert "was not done after 0.001 s" in describe_patches("loud", timeout_s=0.001).error
