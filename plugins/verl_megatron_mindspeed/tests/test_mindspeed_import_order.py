"""On an NPU every order of imports ends wholly patched, or in a refusal that names who came too early."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_megatron_mindspeed.tests.npu_process import FAKES, run_npu

if TYPE_CHECKING:
    from pathlib import Path

BOTH = ("torch_npu", "mindspeed")

PREPARED = """
import logging
arguments, root = list(sys.argv), logging.getLogger()
backend.prepare_process(config(mindspeed={"features": {"moe_alltoall_overlap_comm": True}}))
import snapshot_handler
from megatron.core.transformer.transformer_config import TransformerConfig
from verl_engine.patching.patches import records
from verl_megatron_mindspeed.mindspeed.adaptor import check_same_patches
patcher = sys.modules[snapshot_handler.TransformerConfig.__init__.__globals__["__name__"]]
made = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
same = config(mindspeed={"features": {"moe_alltoall_overlap_comm": True}})
try:
    TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, sparse_mode=1)
except AssertionError as error:
    refused = str(error)
result = {
    "views": views(),
    "arguments": sys.argv == arguments,
    "seen": [name for name in ("job", "q") if hasattr(patcher.get_full_args(), name)],
    "feature": patcher.get_full_args().moe_alltoall_overlap_comm,
    "made": [str(made.params_dtype), made.use_flash_attn],
    "refused": refused,
    "again": attempt(lambda: backend.prepare_process(same)),
    "records": [f"{record.module}:{record.name}" for record in records()],
    "same": attempt(lambda: check_same_patches(same)),
    "other": attempt(lambda: check_same_patches(same.model_copy(update={"recompute": "full"}))),
}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process says that was prepared first, and then imported a handler that imports Megatron."""
    return run_npu(tmp_path_factory.mktemp("prepared"), PREPARED, *BOTH)


def test_preparing_first_patches_everything(prepared: dict[str, Any]) -> None:
    assert len(prepared["views"]) == 6
    assert all(prepared["views"].values()), prepared["views"]


def test_mindspeed_sees_none_of_the_programs_arguments(prepared: dict[str, Any]) -> None:
    assert prepared["arguments"] is True
    assert prepared["seen"] == []


def test_what_the_engine_says_reaches_megatron(prepared: dict[str, Any]) -> None:
    assert prepared["made"] == ["torch.bfloat16", True]
    assert prepared["feature"] is True


@pytest.mark.fault(34)
def test_features_validate_each_config_that_is_made(prepared: dict[str, Any]) -> None:
    assert prepared["refused"] == "When use_flash_attn, only supports sparse modes 0 and 2"


def test_each_patch_is_recorded_and_preparing_again_does_nothing(prepared: dict[str, Any]) -> None:
    assert "megatron.core.transformer.dot_product_attention:DotProductAttention.forward" in prepared["records"]
    assert "megatron.core.transformer.transformer_config:TransformerConfig.__init__" in prepared["records"]
    assert prepared["again"] == {}


def test_an_engine_that_needs_other_patches_is_refused(prepared: dict[str, Any]) -> None:
    assert prepared["same"] == {}
    assert prepared["other"]["error"] == "PreparationConflictError"
    assert "recompute_granularity='full' (MindSpeed has None)" in prepared["other"]["text"]


@pytest.mark.nightly
def test_the_newer_package_is_applied_the_same_way(tmp_path: Path) -> None:
    package = tmp_path / "megatron_adaptor"
    shutil.copytree(FAKES / "mindspeed" / "mindspeed", package)
    for old, new in (("patch_utils", "patches/patch_manager"), ("args_utils", "utils/args_utils")):
        (package / new).parent.mkdir()
        (package / f"{old}.py").rename(package / f"{new}.py")
    (package / "megatron_adaptor.py").rename(package / "__init__.py")
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8").replace("MindSpeedPatchesManager", "PatchesManager")
        text = text.replace("mindspeed.patch_utils", "megatron_adaptor.patches.patch_manager")
        text = text.replace("mindspeed.args_utils", "megatron_adaptor.utils.args_utils")
        text = text.replace("from mindspeed.", "from megatron_adaptor.").replace(
            '("mindspeed",)', '("megatron_adaptor",)'
        )
        file.write_text(text, encoding="utf-8")
    result = run_npu(tmp_path, PREPARED, "torch_npu")
    assert {name for name, is_patched in result["views"].items() if not is_patched} == {"jit", "tuple"}, "by its name"
    assert len(result["records"]) > 20


ORDER = """
def prepare(): backend.prepare_process(config())
def create(): backend.create(config(), None, "actor")
def framework(): import megatron.core.optimizer
def handler(): import snapshot_handler
def adaptor(): import mindspeed.megatron_adaptor
*before, last = {events}
for event in before: globals()[event]()
result = {{"refusal": attempt(globals()[last]), "views": views(), "later": attempt(create), "loaded": loaded()}}
"""


@pytest.mark.parametrize(
    ("events", "importer"),
    [
        pytest.param(events, importer, id="-".join(events), marks=marks)
        for events, importer, marks in (
            (("framework", "prepare"), "imported by __main__ ({folder}/script.py, line ", pytest.mark.nightly),
            (
                ("handler", "prepare"),
                "imported by snapshot_handler ({folder}/snapshot_handler.py, line 2)",
                pytest.mark.nightly,
            ),
            (("adaptor", "prepare"), "imported by mindspeed.patch_utils (", pytest.mark.nightly),
            (
                ("handler", "adaptor", "prepare"),
                "imported by snapshot_handler ({folder}/snapshot_handler.py, line 2)",
                (),
            ),
        )
    ],
)
def test_whoever_imports_megatron_first_is_named_and_the_process_refused(
    tmp_path: Path, events: tuple[str, ...], importer: str
) -> None:
    result = run_npu(tmp_path, ORDER.format(events=events), *BOTH)
    refusal = result["refusal"]
    assert refusal["error"] == "ImportOrderError"
    assert "must prepare the process before megatron is imported, but megatron is there already, " in refusal["text"]
    assert importer.format(folder=tmp_path) in refusal["text"]
    assert "in a process that it has not prepared" in result["later"]["text"], "nor can an engine be made"
    if events == ("handler", "adaptor", "prepare"):
        # The fault that this order hides: MindSpeed does not complain, and a part of Megatron is not patched.
        assert result["views"]["config"] is True
        assert result["views"]["HAVE_TE"] is result["views"]["Adam"] is result["views"]["jit"] is False
        assert result["views"]["handler"] is False
    elif events != ("adaptor", "prepare"):
        assert "mindspeed" not in result["loaded"]
        assert not any(result["views"].values())


FAILED = """
first = attempt(lambda: backend.prepare_process(config({features})))
loaded_then = loaded()
second = attempt(lambda: backend.prepare_process(config({features})))
result = {{
    "first": first, "second": second, "loaded": loaded_then,
    "create": attempt(lambda: backend.create(config({features}), None, "actor")),
}}
"""


def failed(folder: Path, *fakes: str, features: str = "", **environment: str) -> dict[str, Any]:
    """Prepare a process in which that fails, and try to go on."""
    result = run_npu(folder, FAILED.format(features=features), *fakes, **environment)
    assert result["first"]["error"] == "PatchError"
    assert "cannot be used for backend 'megatron'" in result["second"]["text"]
    assert "cannot be used for backend 'megatron'" in result["create"]["text"]
    return result


def test_without_mindspeed_an_npu_is_refused_with_the_steps_to_install_it(tmp_path: Path) -> None:
    result = failed(tmp_path, "torch_npu")
    assert (
        "neither mindspeed nor megatron_adaptor is installed (engine.mindspeed.adaptor=auto)" in result["first"]["text"]
    )
    assert "pip install -e ./MindSpeed" in result["first"]["text"]
    assert "megatron" not in result["loaded"]


@pytest.mark.fault(34)
def test_an_adaptor_that_fails_is_fatal_and_its_error_is_the_cause(tmp_path: Path) -> None:
    result = failed(tmp_path, *BOTH, FAKE_MINDSPEED="fail")
    assert (
        "mindspeed.megatron_adaptor, without which Megatron does not run on an NPU, failed" in result["first"]["text"]
    )
    assert result["first"]["cause"] == "ModuleNotFoundError(\"No module named 'triton'\")"
    assert "pip install triton-ascend" in result["first"]["text"]


def test_a_repatch_that_stops_half_way_is_fatal(tmp_path: Path) -> None:
    result = failed(tmp_path, *BOTH, FAKE_MINDSPEED="conflict")
    assert "repatch failed half way" in result["first"]["text"]
    assert result["first"]["cause"] == "RuntimeError('the patch of LNImpl exist !')"


@pytest.mark.fault(34)
def test_fp8_is_refused_before_anything_is_patched_where_megatron_lacks_a_part(tmp_path: Path) -> None:
    code = """
prepare = lambda: attempt(lambda: backend.prepare_process(config(transformer_options={"fp8": "e4m3"})))
result = {"refusal": prepare(), "loaded": loaded()}
"""
    result = run_npu(tmp_path, code, *BOTH)
    assert result["refusal"]["error"] == "ConfigError"
    assert (
        "engine.transformer_options.fp8=e4m3: MindSpeed's FP8 layers import megatron.training"
        in (result["refusal"]["text"])
    )
    assert not {"mindspeed", "megatron"} & set(result["loaded"])


def test_a_patch_that_was_left_out_is_found(tmp_path: Path) -> None:
    result = failed(tmp_path, *BOTH, FAKE_MINDSPEED="forget")
    assert "its patch of megatron.core.optimizer:get_megatron_optimizer is not applied" in result["first"]["text"]


WORKER_PATH = """
import importlib, pkgutil
from pathlib import Path
import verl_async, verl_engine
from verl_engine.engine.worker import EngineWorker
from verl_engine.host.engine_section import validate_engine_section

failed = []
for package in (verl_engine, verl_async):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            if not found.name.endswith("__main__"): importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            failed.append(error.name)
worker = EngineWorker(validate_engine_section({"backend": "megatron", "device": "npu"}), Path("nowhere"))
result = {"loaded": loaded(), "failed": sorted(set(failed)), "config": type(worker._config).__name__}
"""


def test_the_workers_import_no_megatron_before_they_are_prepared(tmp_path: Path) -> None:
    result = run_npu(tmp_path, WORKER_PATH, "mindspeed")  # transformers would import a torch_npu that is there
    assert result["config"] == "MegatronConfig"
    assert result["loaded"] == []
    assert not {"verl_engine", "verl_async", "torch"} & set(result["failed"])
