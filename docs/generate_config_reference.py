"""Write docs/reference/config.md from the config models.

    python docs/generate_config_reference.py

A test fails while the page differs from the models.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl_async.algorithms.policy_loss import PpoLossConfig
from verl_async.config import RolloutConfig, SftJob, TrainJob
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_engine.contract.engine_config import EngineConfig
from verl_fsdp.config import Fsdp2Config, FsdpConfig
from verl_fsdp_turbo.config import FsdpTurboConfig
from verl_megatron_mindspeed.config import MegatronConfig

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

PAGE = Path(__file__).parent / "reference" / "config.md"
BACKENDS: dict[str, type[EngineConfig]] = {
    "fsdp2": Fsdp2Config,
    "fsdp": FsdpConfig,
    "fsdp_turbo": FsdpTurboConfig,
    "megatron": MegatronConfig,
}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
INTRODUCTION = """\
# Every setting of a job

<!-- Written by docs/generate_config_reference.py from the config models' docstrings: change those, not this page. -->

A job is a YAML file with the sections below. Settings on the command line win over the file:

    verl-engine train examples/addition_grpo.yaml engine.learning_rate=1e-4 trainer.num_steps=50 --output outputs/try

The file is YAML 1.2, and so is the value of each setting on the command line: `off` and `1:30` are texts, `010` is ten,
`1e-6` is a number. `${data.seed}` stands for the value of another setting; a literal `${` is written `\\${`.

An unknown key, a wrong type or a value out of range is an error before anything starts. No value is turned into
another: `"1"`, `1.0` and `true` are no integers, and only `true` and `false` are yes and no. Paths are seen from the
current folder. `--dry-run` checks a job and prints it whole, defaults included.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    parts.append("\n## Jobs of `verl-engine train`\n\n" + _sections_of(TrainJob))
    parts.append("\n## Jobs of `verl-engine sft`\n\n" + _sections_of(SftJob))
    parts.append("\n## Section `engine`, with every backend\n\n" + _section(EngineConfig, "engine"))
    for name, config_class in BACKENDS.items():
        heading = f"\n## Section `engine` with `backend: {name}`\n\n"
        parts.append(heading + _section(config_class, "engine", leave_out=frozenset(EngineConfig.model_fields)))
    own = _section(EmbeddedConfig, "rollout", leave_out=frozenset(RolloutConfig.model_fields))
    parts.append(f"\n## Section `rollout` with `backend: embedded`\n\n{own}")
    for place, section_class in _section_classes().items():
        parts.append(f"\n## {place}\n\n" + _section(section_class, place.split("`")[1]))
    heading = "\n## Section `algorithm.loss_config` with `loss: ppo`\n\n"
    parts.append(heading + _section(PpoLossConfig, "algorithm.loss_config"))
    return "".join(parts)


def _section_classes() -> dict[str, type[BaseModel]]:
    """Return the sections of both jobs by their heading; one that both share stands once."""
    found: dict[str, type[BaseModel]] = {}
    for job, command in ((TrainJob, "train"), (SftJob, "sft")):
        for name, section_class in _sections(job):
            if section_class in found.values():
                continue
            shared = any(section_class is other for other_job in (TrainJob, SftJob) if other_job is not job
                         for _, other in _sections(other_job))  # fmt: skip
            found[f"Section `{name}`" if shared else f"Section `{name}` of `{command}`"] = section_class
    return found


def _sections(job: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in job.model_fields.items():
        for part in (field.annotation, *get_args(field.annotation)):
            if name != "engine" and isinstance(part, type) and issubclass(part, BaseModel):
                yield name, part


def _sections_of(job: type[BaseModel]) -> str:
    lines = ["| section | needed | what it is |", "|---|---|---|", "| `engine` | yes | The training engine, by name. |"]
    for name, section_class in _sections(job):
        needed = "yes" if job.model_fields[name].is_required() else "no"
        own = job.model_fields[name].description
        about = " ".join(filter(None, (_first_line(section_class.__doc__), own)))
        lines.append(f"| `{name}` | {needed} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _section(section_class: type[BaseModel], place: str, leave_out: Container[str] = ()) -> str:
    lines = [_first_line(section_class.__doc__), "", "| setting | values | default | meaning |", "|---|---|---|---|"]
    inner = []
    for name, field in section_class.model_fields.items():
        if name in leave_out:
            continue
        values = _cell(_type_name(field.annotation) + _bounds(field))
        lines.append(f"| `{place}.{name}` | {values} | {_default(field)} | {_cell(field.description or '')} |")
        parts = list(_models_in(field.annotation))
        each = "" if field.annotation in parts or type(None) in get_args(field.annotation) else ", each"
        inner += [f"\nOf `{place}.{name}`{each}:\n\n{_section(part, name)}" for part in parts]
    return "\n".join(lines) + "\n" + "".join(inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a value may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _type_name(annotation: Any) -> str:
    bounds = ""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        bounds = "".join(_bounds(part) for part in metadata if isinstance(part, FieldInfo))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in {Union, types.UnionType}:
        return " or ".join(_type_name(part) for part in arguments)
    if origin is tuple:
        return f"list of {' and '.join(_type_name(part) for part in arguments if part is not ...)}"
    if origin is dict:
        return "settings by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section, see below"
    names = {bool: "true or false", float: "number", int: "integer", str: "text", Path: "path", types.NoneType: "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation))) + bounds


def _bounds(field: FieldInfo) -> str:
    signs = (
        (sign, getattr(part, name)) for part in field.metadata for name, sign in SIGNS.items() if hasattr(part, name)
    )
    return "".join(f", {sign} {_power(limit)}" for sign, limit in signs)


def _power(limit: float) -> str:
    """Write 2147483647 as 2^31 - 1."""
    for more, ending in ((0, ""), (1, " - 1")):
        number = int(limit) + more
        if number > 10**6 and not number & (number - 1):
            return f"2^{number.bit_length() - 1}{ending}"
    return str(limit)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`{}`" if get_origin(field.annotation) is dict else "see below"
    if field.default is PydanticUndefined:
        return "needed"
    if isinstance(field.default, BaseModel):
        return "see below"
    if field.default is None or isinstance(field.default, bool):
        return f"`{'null' if field.default is None else str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`"


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n", maxsplit=1)[0].replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    main()
