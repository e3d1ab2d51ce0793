from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from core.tests.test_doctor_conflicts import installed
from verl_engine.command.app import main
from verl_engine.command.doctor import machine
from verl_engine.command.doctor.environment import Situation, read_environment
from verl_engine.command.doctor.findings import Finding
from verl_engine.command.doctor.machine import find_devices, machine_findings
from verl_engine.contract.names import BACKENDS_GROUP, COMMANDS_GROUP

if TYPE_CHECKING:
    from pathlib import Path

SLOW = "cores here; ranks that share cores slow each other down badly;"
PATCHING_HOOKS = """
import toy_framework_names

def replace(original):
    return len

from dataclasses import replace as changed
from verl_engine import DeclaredPatch, patch
{hooks}
SPEC = changed(SPEC, patches=(DeclaredPatch("toy_framework:size", "the original cannot count"),))

@hookimpl
def engine_prepare_process(config):
    patch("toy_framework:size", replace)
    import toy_framework
"""


def hints(environment: dict[str, str], cores: int = 8, num_ranks: int = 1, npu: bool = False) -> dict[str, str]:
    situation = Situation(environment, cores, num_ranks, frozenset({"torch-npu"} if npu else ()))
    return {variable.name: variable.hint for variable in read_environment(situation) if variable.hint}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.fixture
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch out: importing it takes seconds, and one test of it is enough."""
    monkeypatch.setattr(
        "verl_engine.command.doctor.examination.find_devices", lambda *_: ({"cpu": ["a processor"]}, "")
    )


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], _no_torch: None) -> Any:
    """Run the doctor with --json; return the exit code and the object."""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = run(*arguments, "--json")
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("environment", "cores", "num_ranks", "hint"),
    [
        ({}, 8, 1, None),
        ({}, 8, 2, "not set: each of 2 ranks starts 8 threads; export OMP_NUM_THREADS=1"),
        ({"OMP_NUM_THREADS": "4"}, 8, 2, None),
        ({"OMP_NUM_THREADS": "4"}, 8, 3, f"4 threads x 3 ranks are more than the 8 {SLOW} export OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "1"}, 2, 3, f"1 threads x 3 ranks are more than the 2 {SLOW} use at most 2 ranks here"),
        ({"OMP_NUM_THREADS": "0"}, 8, 1, "must be a whole number above 0"),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 1, "must be a whole number above 0"),
    ],
)
def test_threads_and_ranks_must_fit_the_cores(
    environment: dict[str, str], cores: int, num_ranks: int, hint: str | None
) -> None:
    assert hints(environment, cores, num_ranks).get("OMP_NUM_THREADS") == hint


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("OMP_WAIT_POLICY", "PASSIVE", None),
        ("OMP_WAIT_POLICY", "active", "export OMP_WAIT_POLICY=PASSIVE"),
        ("CUDA_VISIBLE_DEVICES", "0,1", None),
        ("CUDA_VISIBLE_DEVICES", "", "hides every device"),
        ("CUDA_VISIBLE_DEVICES", "-1", "hides every device"),
        ("ASCEND_RT_VISIBLE_DEVICES", "3,3", "names a device twice"),
        ("HCCL_CONNECT_TIMEOUT", "1200", None),
        ("HCCL_CONNECT_TIMEOUT", "20min", "must be a whole number"),
        ("ASCEND_OPP_PATH", "/no/such/folder", "/no/such/folder does not exist; source CANN's set_env.sh again"),
        ("ASCEND_HOME_PATH", "/no/such/folder", "/no/such/folder does not exist; source CANN's set_env.sh again"),
        ("RAY_ADDRESS", "10.0.0.1:6379", "jobs join the Ray cluster at 10.0.0.1:6379"),
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("HCCL_SOCKET_IFNAME", "=lo", None),
        ("NCCL_SOCKET_IFNAME", "^docker0", None),
        ("GLOO_SOCKET_IFNAME", "no-such-nic", "no network interface is called no-such-nic; there are "),
    ],
)
def test_an_odd_value_has_a_hint(name: str, value: str, hint: str | None) -> None:
    found = hints({name: value}).get(name)
    assert found == hint or (found is not None and hint is not None and hint in found)


def test_cann_and_autoload_matter_only_with_torch_npu() -> None:
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert hints(environment) == {}
    assert sorted(hints(environment, npu=True)) == ["ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"]


def test_variables_that_matter_are_shown_and_secrets_are_not() -> None:
    environment = {"RAY_API_KEY": "s3cret", "RAY_DEDUP_LOGS": "1", "HOME": "x", "HCCL_BUFFSIZE": "200"}
    found = {variable.name: variable.value for variable in read_environment(Situation(environment, 1, 1, frozenset()))}
    assert found["RAY_API_KEY"] == "(set, not shown)"
    assert found["RAY_DEDUP_LOGS"] == "1"
    assert found["HCCL_BUFFSIZE"] == "200"
    assert found["OMP_NUM_THREADS"] is None
    assert "HOME" not in found


def test_an_error_breaks_the_backend_that_it_concerns_and_a_warning_none() -> None:
    general, own = Finding("error", "torch", "gone"), Finding("error", "backend a", "gone", concerns_all=False)
    odd = Finding("warning", "triton", "odd")
    assert [general.breaks(None), general.breaks("a"), general.breaks("b")] == [True, True, True]
    assert [own.breaks(None), own.breaks("a"), own.breaks("b")] == [True, True, False]
    assert [odd.breaks(None), odd.breaks("a")] == [False, False]


def test_small_shared_memory_and_missing_torch_are_found() -> None:
    small = {"shared_memory_free_bytes": 64 << 20}
    memory, torch = sorted(machine_findings(small, "torch is not installed"), key=lambda finding: finding.subject)
    assert "64 MiB are free" in memory.text
    assert "--shm-size" in memory.text
    assert torch.fix == "python -m pip install torch"
    assert machine_findings({"shared_memory_free_bytes": 8 << 30}, "") == []
    assert machine_findings({"shared_memory_free_bytes": None}, "") == []


@pytest.mark.parametrize(
    ("probe", "error"),
    [
        ("print('noise'); print('{\"cuda\": [\"H100\"]}')", ""),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
        ("import time; time.sleep(60)", "torch was not imported after 1 s"),
    ],
)
def test_torch_is_asked_in_a_process_that_may_fail(probe: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROBE", probe)
    devices, found = find_devices(installed(torch="2.8.0"), timeout_s=10 if "sleep" not in probe else 1)
    assert found == error
    assert "cpu" in devices
    assert ("cuda" in devices) is (error == "")


def test_without_torch_nothing_is_started() -> None:
    assert find_devices({}, timeout_s=1)[1] == "torch is not installed"


@pytest.mark.fault(33)
@pytest.mark.parametrize(("chosen", "code"), [((), 1), (("--backend", "broken"), 1), (("--backend", "toy"), 0)])
def test_a_broken_backend_breaks_no_other(site: Path, report: Any, chosen: tuple[str, ...], code: int) -> None:
    write_distribution(
        site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": HOOKS.format(name="toy")}
    )
    write_distribution(site, "broken-dist", {BACKENDS_GROUP: {"broken": "no_module"}}, requires=["pydantic>=99"])
    found_code, found = report(*chosen)
    assert found_code == code
    assert found["ok"] is (code == 0)
    broken = [finding for finding in found["findings"] if finding["subject"] == "backend broken"]
    if "toy" not in chosen:
        assert broken[0]["text"].startswith("broken-dist 1.0 needs pydantic>=99, but ")
        assert broken[0]["fix"] == 'python -m pip install "pydantic>=99"'
    assert len(broken) == ("toy" not in chosen)
    assert "no_module" not in sys.modules


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("tooy", "did you mean toy?", None),
        ("raising", "importing raising_hooks failed: RuntimeError: a bug", None),
        ("elsewhere", "it runs on npu; this machine has cpu", None),
    ],
)
def test_the_chosen_backend_is_loaded(site: Path, report: Any, name: str, text: str, fix: str | None) -> None:
    modules = {
        "toy_hooks": HOOKS.format(name="toy"),
        "elsewhere_hooks": HOOKS.format(name="elsewhere").replace('("cpu",)', '("npu",)'),
        "raising_hooks": "raise RuntimeError('a bug')",
    }
    points = {"toy": "toy_hooks", "elsewhere": "elsewhere_hooks", "raising": "raising_hooks"}
    write_distribution(site, "toys", {BACKENDS_GROUP: points}, modules=modules)
    code, found = report("--backend", name)
    assert code == 1
    [finding] = [finding for finding in found["findings"] if finding["subject"] == f"backend {name}"]
    assert text in finding["text"]
    assert finding["fix"] == fix


@pytest.mark.parametrize(("chosen", "severity"), [(("--backend", "toy"), "error"), ((), "warning")])
def test_a_module_on_no_package_index_is_got_as_the_backend_says_and_missed_where_it_is_named(
    site: Path, report: Any, chosen: tuple[str, ...], severity: str
) -> None:
    needs = "\nfrom dataclasses import replace\nfrom verl_engine import NeededModule\n"
    needs += "SPEC = replace(SPEC, needs=(NeededModule('no_such_module', 'git clone it'),))\n"
    keywords = ["verl-engine-module-no_such_module"]
    modules = {"toy_hooks": HOOKS.format(name="toy") + needs}
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules=modules, keywords=keywords)
    code, found = report(*chosen)
    assert code == (severity == "error")
    assert found["ok"] is (code == 0)
    [finding] = [finding for finding in found["findings"] if finding["subject"] == "backend toy"]
    assert finding["severity"] == severity
    assert finding["text"] == "missing module no_such_module, which is on no package index"
    assert finding["fix"] == "git clone it"


def test_hooks_that_import_torch_are_odd_but_work(site: Path, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    hooks = "import sys; sys.modules.setdefault('transformers', sys)\n" + HOOKS.format(name="toy")
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": hooks})
    try:
        code, found = report("--backend", "toy")
    finally:
        if sys.modules.get("transformers") is sys:
            del sys.modules["transformers"]
    assert code == 0
    assert any("its hooks module imports transformers" in finding["text"] for finding in found["findings"])


def test_one_name_of_two_distributions_is_a_conflict(site: Path, report: Any) -> None:
    for name in ("one", "two"):
        write_distribution(site, name, {COMMANDS_GROUP: {"polish": f"{name}_polish"}})
    code, found = report()
    assert code == 1
    texts = [finding["text"] for finding in found["findings"] if finding["subject"] == "command polish"]
    assert texts == ["name also offered by two", "name also offered by one"]


def test_patches_of_a_backend_are_listed_with_their_reason(site: Path, report: Any) -> None:
    modules = {
        "toy_hooks": PATCHING_HOOKS.format(hooks=HOOKS.format(name="toy")),
        "toy_framework": "def size(what):\n    return -1",
        "toy_framework_names": "",
    }
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules=modules)
    code, found = report("--backend", "toy", "--patches")
    assert code == 0, found["findings"]
    [toy] = found["patches"]
    [patch] = toy["patches"]
    assert (patch["module"], patch["name"]) == ("toy_framework", "size")
    assert patch["reason"] == "the original cannot count"
    assert "toy_framework" not in sys.modules


def test_a_preparation_that_fails_is_an_error(site: Path, report: Any) -> None:
    hooks = (
        HOOKS.format(name="toy") + "\n@hookimpl\ndef engine_prepare_process(config):\n    raise OSError('no driver')"
    )
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": hooks})
    code, found = report("--backend", "toy", "--patches")
    assert code == 1
    [finding] = [finding for finding in found["findings"] if finding["subject"] == "backend toy"]
    assert finding["severity"] == "error"
    assert "no driver" in finding["text"]


@pytest.mark.usefixtures("_no_torch")
def test_the_tables_show_all_and_end_with_the_commands(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"toy_hooks": HOOKS.format(name="toy")}
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules=modules)
    write_distribution(site, "broken-dist", {BACKENDS_GROUP: {"broken": "no_module"}}, requires=["no-such-thing[x]>=2"])
    monkeypatch.setenv("COLUMNS", "200")
    assert run("--backend", "toy", "--patches") == 0
    text = capsys.readouterr().out
    for part in (
        "This machine",
        "Python",
        "toys",
        "OMP_NUM_THREADS",
        "Backend toy patches nothing",
    ):
        assert part in text
    assert text.endswith("Backend toy can be used.\n")
    assert "broken" not in text
    assert run() == 1
    text = capsys.readouterr().out
    assert "broken, see below" in text
    assert '  python -m pip install "no-such-thing[x]>=2"' in text


@pytest.mark.usefixtures("_no_torch")
def test_the_tables_tell_what_is_incomplete_from_what_is_broken(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules, keywords = {"toy_hooks": HOOKS.format(name="toy")}, ["verl-engine-module-no_such_module"]
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules=modules, keywords=keywords)
    monkeypatch.setenv("COLUMNS", "200")
    run()
    text = capsys.readouterr().out
    assert "incomplete, see below" in text
    assert "warning: backend toy: missing module no_such_module" in text


@pytest.mark.usefixtures("_no_torch")
@pytest.mark.parametrize("arguments", [("--ranks", "0"), ("--ranks", "many"), ("--back", "toy")])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


@pytest.mark.slow
def test_the_doctor_itself_imports_no_torch() -> None:
    code = (
        "import sys\nfrom verl_engine.command.app import main\ntry:\n    main(['doctor', '--json'])\nfinally:\n"
        "    print(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert found["machine"]["cores"] >= 1
    assert found["packages"]["verl-engine-core"]
    assert "cpu" in found["devices"]


def test_entry_points_that_cannot_be_read_are_found_and_end_no_command(site: Path, report: Any) -> None:
    broken = write_distribution(site, "broken-dist", {})
    (broken / "entry_points.txt").write_text("[some.group]\nno equals sign\n", encoding="utf-8")
    code, found = report()
    (finding,) = (finding for finding in found["findings"] if finding["subject"] == "broken-dist")
    assert code == 1
    assert finding["text"].startswith("its entry points cannot be read (")
    assert finding["fix"] == "python -m pip install --force-reinstall --no-deps broken-dist"


@pytest.mark.usefixtures("_no_torch")
def test_what_a_backend_prints_does_not_spoil_the_json(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"print('a stray line')\n{HOOKS.format(name='toy')}"
    write_distribution(site, "toy", {BACKENDS_GROUP: {"toy": "toy_noisy"}}, modules={"toy_noisy": text})
    run("--backend", "toy", "--json")
    written = capsys.readouterr()
    assert json.loads(written.out)["backend"] == "toy"
    assert "a stray line" in written.err
