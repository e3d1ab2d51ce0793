"""Distributions that do not go together, as the doctor finds them."""

from __future__ import annotations

import pytest

from verl_engine.command.doctor.conflicts import find_conflicts
from verl_engine.host.distributions import Distribution


def installed(**versions: str) -> dict[str, Distribution]:
    """Fake distributions, some with requirements after a bar: ``torchvision="0.1|torch==2.0"``."""
    found = {}
    for key, text in versions.items():
        version, _, requirement = text.partition("|")
        name = key.replace("_", "-")
        metadata = f"Name: {name}\nRequires-Dist: {requirement}\n" if requirement else f"Name: {name}\n"
        found[name] = Distribution(name, version, {"METADATA": metadata}.get)
    return found


@pytest.mark.parametrize(
    ("versions", "subjects"),
    [
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0|torch==2.13.0"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.20.0|torch==2.5.0"}, ["warning torchvision"]),
        ({"torchaudio": "2.5.0|torch==2.5.0"}, ["warning torchaudio"]),
        ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post2"}, []),
        ({"torch": "2.8.0", "torch_npu": "2.7.1"}, ["error torch_npu"]),
        ({"torch": "2.8.0+cpu", "triton": "3.4.0"}, ["warning triton"]),
        ({"triton": "3.4.0", "triton_ascend": "3.2.0"}, ["error triton"]),
    ],
)
def test_distributions_that_do_not_go_together_are_found(versions: dict[str, str], subjects: list[str]) -> None:
    found = find_conflicts(installed(**versions), {"cpu": []})
    assert [f"{finding.severity} {finding.subject}" for finding in found] == subjects
    assert all(finding.fix for finding in found)


def test_triton_belongs_beside_a_gpu() -> None:
    assert find_conflicts(installed(torch="2.8.0", triton="3.4.0"), {"cpu": [], "cuda": ["H100"]}) == []


@pytest.mark.fault(34)
@pytest.mark.parametrize("others", [{"torch_npu": "2.8.0"}, {"torch_npu": "2.8.0", "triton_ascend": "3.2.0"}])
def test_an_npu_keeps_the_module_triton(others: dict[str, str]) -> None:
    [finding] = find_conflicts(installed(torch="2.8.0", triton="3.4.0", **others), {"cpu": []})
    assert str(finding.fix).endswith("&& python -m pip install triton-ascend")
    assert find_conflicts(installed(torch="2.8.0", torch_npu="2.8.0", triton_ascend="3.2.0"), {"cpu": []}) == []


def test_torch_npu_says_which_torch_it_goes_with() -> None:
    [finding] = find_conflicts(installed(torch="2.8.0", torch_npu="2.7.1"), {"cpu": []})
    assert finding.text == "torch_npu 2.7.1 goes with torch 2.7.1, but torch 2.8.0 is installed"
    assert finding.fix == "python -m pip install torch==2.7.1"


def test_torch_npu_older_than_the_engines_need_is_replaced_with_its_torch() -> None:
    core = "0.1.0|torch>=2.9; extra == 'engine'"
    [finding] = find_conflicts(installed(torch="2.9.1", torch_npu="2.7.1", verl_engine_core=core), {"cpu": []})
    assert finding.text.endswith("but torch 2.9.1 is installed; the engines need torch >=2.9")
    assert "torch==VERSION torch_npu==VERSION" in str(finding.fix)
