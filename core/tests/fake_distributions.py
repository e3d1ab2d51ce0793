"""Write installed distributions into a folder, as pip would leave them there, with small modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HOOKS = """
from verl_engine import BackendSpec, Capabilities, EngineConfig, OptimizerStep, hookimpl
from contextlib import nullcontext

class ToyConfig(EngineConfig):
    width: int = 4

SPEC = BackendSpec(
    name={name!r},
    config_class=ToyConfig,
    devices=("cpu",),
    capabilities=Capabilities(gaps={{"snapshots": "a list has no weights"}}),
    plugin_api_version=2,
)

@hookimpl
def engine_create(config, model_folder, role):
    return [role]

@hookimpl
def engine_gradient_sync(engine, is_last_micro_batch):
    engine.append(is_last_micro_batch)
    return nullcontext()

@hookimpl
def engine_optimizer_step(engine):
    return OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)
"""
"""A complete hooks module, to be formatted with the backend's name."""


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    *,
    version: str = "1.0",
    modules: Mapping[str, str] | None = None,
    keywords: Sequence[str] = (),
    requires: Sequence[str] = (),
    info: str = "",
) -> Path:
    """Write one distribution.

    Args:
        folder: a folder on ``sys.path``.
        name: as in its pyproject.
        entry_points: name and value of each, by group.
        version: of the distribution.
        modules: source text by module name.
        keywords: of its metadata.
        requires: its ``Requires-Dist`` lines.
        info: name of the metadata folder; by default that of a wheel.
    Returns:
        The metadata folder.
    """
    folder.mkdir(exist_ok=True)
    for module, text in (modules or {}).items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    metadata = folder / (info or f"{name.replace('-', '_')}-{version}.dist-info")
    metadata.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", f"Summary: About {name}"]
    lines += [f"Keywords: {','.join(keywords)}"] if keywords else []
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    headers = "PKG-INFO" if info.endswith(".egg-info") else "METADATA"
    (metadata / headers).write_text("\n".join([*lines, "", "Requires-Dist: not-a-header"]), encoding="utf-8")
    sections = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items())])
        for group, points in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n\n".join(sections), encoding="utf-8")
    return metadata
