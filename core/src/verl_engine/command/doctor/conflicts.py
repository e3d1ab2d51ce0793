"""Distributions that do not go together, or that break what reads the metadata of all of them, as torch does."""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution as ImportlibDistribution
from importlib.metadata import distributions

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_engine.command.doctor.findings import Finding
from verl_engine.host.distributions import Distribution
from verl_engine.host.install_hints import pip_install
from verl_engine.host.requirements import missing_requirements

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Built for one version of torch; importing them beside another fails, and transformers imports them where it can."""


def find_conflicts(installed: Mapping[str, Distribution], devices: Mapping[str, list[str]]) -> list[Finding]:
    """Look at all installed distributions, by normalised name, together, with the devices that `find_devices` found."""
    return [*_companions(installed), *_torch_npu(installed), *_triton(installed, devices)]


def _companions(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    torch = installed.get("torch")
    for name in TORCH_COMPANIONS:
        found = installed.get(name)
        if found is None:
            continue
        requirements = [text for field, text in found.read_headers() if field == "requires-dist"]
        wanted = [text for text in missing_requirements(requirements, installed) if re.match(r"torch\b", text)]
        if wanted:
            have = f"torch {torch.version} is installed" if torch else "torch is not"
            yield Finding(
                "warning",
                name,
                f"{name} {found.version} was built for {wanted[0]}, but {have}; importing transformers may fail. No "
                "engine needs it",
                f"python -m pip uninstall {name}",
            )


def _torch_npu(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    torch, npu = installed.get("torch"), installed.get("torch-npu")
    if torch is None or npu is None or _release(torch.version) == _release(npu.version):
        return
    wanted, needed = _release(npu.version), _needed_torch(installed)
    text = f"torch_npu {npu.version} goes with torch {wanted}, but torch {torch.version} is installed"
    if needed is None or wanted in needed:
        yield Finding("error", "torch_npu", text, f"python -m pip install torch=={wanted}")
    else:
        fix = "python -m pip install --upgrade torch==VERSION torch_npu==VERSION, the same version of both"
        yield Finding("error", "torch_npu", f"{text}; the engines need torch {needed}", fix)


def _needed_torch(installed: Mapping[str, Distribution]) -> SpecifierSet | None:
    core = installed.get("verl-engine-core")
    headers = core.read_headers() if core else []
    requirements = [Requirement(text) for field, text in headers if field == "requires-dist"]
    return next((requirement.specifier for requirement in requirements if requirement.name == "torch"), None)


def _triton(installed: Mapping[str, Distribution], devices: Mapping[str, list[str]]) -> Iterator[Finding]:
    if "triton" not in installed:
        return
    if "triton-ascend" in installed:
        yield Finding(
            "error",
            "triton",
            "triton and triton-ascend install the same package, and one overwrote the other",
            "python -m pip uninstall -y triton triton-ascend && python -m pip install triton-ascend",
        )
    elif "torch-npu" in installed or "npu" in devices:
        yield Finding(
            "warning",
            "triton",
            f"triton {installed['triton'].version} is installed, and it knows no NPU: there the module triton comes "
            "from triton-ascend, and MindSpeed imports it",
            "python -m pip uninstall -y triton && python -m pip install triton-ascend",
        )
    elif not devices.keys() & {"cuda", "xpu"}:
        yield Finding(
            "warning",
            "triton",
            f"triton {installed['triton'].version} is installed, but there is no GPU; some libraries take its presence "
            "for one",
            "python -m pip uninstall triton",
        )


def _release(version: str) -> str:
    """``2.7.1`` of ``2.7.1.post2+cpu``."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version


def unreadable_metadata() -> list[Finding]:
    """Read the entry points of every distribution, as an import of torch does."""
    problems = ((distribution.metadata["Name"], _problem(distribution)) for distribution in distributions())
    return [
        Finding(
            "error",
            name or "a distribution without a name",
            f"its entry points cannot be read ({problem}); importing torch reads those of everything installed, and "
            "fails",
            pip_install("--force-reinstall", "--no-deps", name) if name else None,
        )
        for name, problem in problems
        if problem
    ]


def _problem(distribution: ImportlibDistribution) -> str:
    try:
        list(distribution.entry_points)
    except Exception as error:  # noqa: BLE001 - broken files raise anything
        return f"{type(error).__name__}: {error}"
    return ""
