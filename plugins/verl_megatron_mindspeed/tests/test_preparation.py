from __future__ import annotations

import json
import subprocess
import sys

import pytest

from verl_engine.command.doctor.patch_report import describe_patches
from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.cpu_support.patch_list import PATCHES
from verl_megatron_mindspeed.preparation import declared_patches, prepare_process

QUIET = """
import json, sys, warnings
from plugins.verl_megatron_mindspeed.tests.prepared_ranks import prepare
prepare()
early = sorted(name for name in sys.modules if name.partition(".")[0] in ("megatron", "mbridge", "mindspeed"))
with warnings.catch_warnings(record=True) as caught:
    import megatron.core.models.gpt, megatron.core.optimizer
from megatron.core.pipeline_parallel import schedules
said = [str(warning.message) for warning in caught if warning.category is UserWarning]
print(json.dumps([early, said, schedules.torch.__name__]))
"""


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_on_a_cpu_its_patches_are_declared(device: str) -> None:
    assert declared_patches(MegatronConfig(device=device)) == PATCHES  # type: ignore[arg-type]


def test_nothing_of_the_cpu_support_is_declared_for_another_device() -> None:
    assert declared_patches(MegatronConfig(device="cuda")) == ()
    assert not set(declared_patches(MegatronConfig(device="npu"))) & set(PATCHES)


def test_a_device_that_is_not_there_is_refused_before_anything_is_patched() -> None:
    with pytest.raises(ConfigError, match="device='cuda' is not available on this machine"):
        prepare_process(MegatronConfig(device="cuda"))


def test_each_patch_has_a_name_of_its_own_and_a_reason() -> None:
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    assert all(len(patch.reason) > len("a reason") for patch in PATCHES)


def test_preparation_imports_no_megatron_and_makes_its_later_import_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    early, said, fake = json.loads(done.stdout)
    assert (early, said) == ([], [])
    assert fake == "verl_megatron_mindspeed.cpu_support.torch_on_cpu"


def test_the_doctor_lists_each_patch_with_its_reason() -> None:
    report = describe_patches("megatron", {"device": "cpu"})
    assert (report.error, report.patches) == ("", ())
    assert report.declared == {patch.target: patch.reason for patch in PATCHES}
