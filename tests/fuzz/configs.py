"""Broken jobs: every setting of every section and backend, found by looking at the models, and broken YAML."""

from __future__ import annotations

import random as random_numbers
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, get_origin

from pydantic import BaseModel

from tests.fuzz.cases import ChangedError, Findings
from tests.fuzz.values import UNKNOWN, draw_text, same
from verl_async.config import SftJob, TrainJob
from verl_async.job import load_sft_job, load_train_job, resolved
from verl_async.preflight import check_sft_job, check_train_job
from verl_async.report.output_folder import config_yaml
from verl_engine.contract.errors import EngineError
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import list_plugins

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from pydantic.fields import FieldInfo

LONGEST_MESSAGE: Final = 20_000
DANGEROUS: Final = {"reward.function"}
"""Imported by a dry run; whatever is drawn for them names no module."""

JUNK: Final = (b"", b"\xff", b"\0", b"\t", b"\n", b":", b"- ", b"'", b"{", b"[", b"&a ", b"*a", b"!", b"${")


class JobKind:
    """One kind of job with one backend: a sound recipe, and all its settings."""

    def __init__(self, job_class: type[TrainJob | SftJob], backend: str, files: Path) -> None:
        self.is_training = job_class is TrainJob
        self.name = f"{'train' if self.is_training else 'sft'} with {backend}"
        data = {"prompts": files / "prompts.jsonl"} if self.is_training else {"examples": files / "examples.jsonl"}
        self.recipe: dict[str, Any] = {
            "model": {"path": str(files / "model")},
            "engine": {"backend": backend},
            "data": {name: str(path) for name, path in data.items()},
            "trainer": {"num_steps": "3"},
            "evaluation": {"sets": {"held_out": {"prompts": str(files / "prompts.jsonl")}}},
        }
        config_class = BackendHost.load(backend).spec.config_class
        self.settings = [*_settings(job_class, ""), *_settings(config_class, "engine.")]

    def load(self, recipe: Path, overrides: list[str]) -> TrainJob | SftJob:
        """Load, and try what a dry run tries."""
        return load_train_job(recipe, overrides) if self.is_training else load_sft_job(recipe, overrides)


def _settings(model: type[BaseModel], at: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        place = f"{at}{name}"
        yield place, field
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel) and place != "engine":
                by_name = "held_out." if get_origin(field.annotation) is dict else ""
                yield from _settings(part, f"{place}.{by_name}")


def job_kinds(files: Path) -> list[JobKind]:
    """Return both kinds of job with each installed backend."""
    backends = sorted(entry.name for entry in list_plugins(BACKEND) if entry.name != "toy")
    return [JobKind(job_class, backend, files) for job_class in (TrainJob, SftJob) for backend in backends]


def fuzz_configs(findings: Findings, folder: Path, files: Path, number: int, seed: int = 0) -> None:
    """Try a number of broken jobs, all from one seed; the settings of all kinds are walked through in turn.

    Args:
        findings: gets what came of them.
        folder: for recipes; writable.
        files: of `write_files`.
        number: of jobs.
        seed: of what is drawn.
    """
    random = random_numbers.Random(seed)
    kinds = job_kinds(files)
    every = [(kind, setting) for kind in kinds for setting in kind.settings]
    random.shuffle(every)
    for index in range(number):
        kind, first = every[index % len(every)]
        others = random.sample(kind.settings, random.choice([0, 0, 0, 1, 3]))
        drawn = {place: draw_text(field.annotation, random) for place, field in [first, *others]}
        drawn |= dict.fromkeys(DANGEROUS & drawn.keys(), ("no.such.function", "no.such.function"))
        recipe, overrides = _write(kind, drawn, folder / "recipe.yaml", random)
        with findings.case("configs", (kind.name, drawn, overrides, recipe.read_bytes())):
            _try(findings, kind, recipe, overrides, drawn)


def _write(kind: JobKind, drawn: dict[str, tuple[str, object]], recipe: Path, random: Random) -> tuple[Path, list[str]]:
    """Set what was drawn in the file or by overrides; now and then the file's text is broken too."""
    settings = deepcopy(kind.recipe)
    overrides = []
    for place, (text, _) in drawn.items():
        if random.random() < 0.5 or not _set(settings, place.split("."), text):
            overrides.append(f"{place}={text}")
    data = _block(settings, 0).encode("utf-8", "surrogateescape")
    if random.random() < 0.1:
        cut = random.randrange(len(data))
        junk = random.choice(JUNK)
        data = data[:cut] + junk + data[cut + random.randrange(3) :]
        drawn.update(dict.fromkeys(drawn, ("", UNKNOWN)))
    recipe.write_bytes(data)
    return recipe, overrides


def _set(settings: dict[str, Any], parts: list[str], text: str) -> bool:
    section: Any = settings
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return False
    section[parts[-1]] = text
    return True


def _block(settings: dict[str, Any], depth: int) -> str:
    lines = []
    for name, value in settings.items():
        is_section = isinstance(value, dict)
        text = f"\n{_block(value, depth + 1)}" if is_section else f" {value}\n"
        lines.append(f"{'  ' * depth}{name}:{text}")
    return "".join(lines)


def _try(
    findings: Findings, kind: JobKind, recipe: Path, overrides: list[str], drawn: dict[str, tuple[str, object]]
) -> None:
    try:
        job = kind.load(recipe, overrides)
    except EngineError as error:
        findings.counts["refused"] += 1
        _check_message(kind, str(error), drawn, recipe)
        return
    findings.counts["accepted"] += 1
    for place, (_, expected) in drawn.items():
        value = _get(job, place)
        covered = any(_overlap(place, other) for other in drawn) or place in ("engine", "engine.total_steps")
        if not covered and not same(expected, value):
            raise ChangedError(f"{place} is {value!r}, and {expected!r} was written")
    again = recipe.with_name("config.yaml")
    again.write_text(config_yaml(resolved(job)), encoding="utf-8")
    if kind.load(again, []) != job:
        raise ChangedError("what config.yaml says is another job")
    try:
        check_train_job(job, None) if isinstance(job, TrainJob) else check_sft_job(job, None)
    except EngineError as error:
        _check_message(kind, str(error), drawn, recipe)


def _overlap(place: str, other: str) -> bool:
    """Tell whether one setting holds the other: then the last one written counts."""
    return place != other and (f"{place}.".startswith(f"{other}.") or f"{other}.".startswith(f"{place}."))


def _get(job: Any, place: str) -> object:
    for part in place.split("."):
        job = job.get(part, UNKNOWN) if isinstance(job, dict) else getattr(job, part, UNKNOWN)
    return job


def _check_message(kind: JobKind, message: str, drawn: dict[str, tuple[str, object]], recipe: Path) -> None:
    """A refusal is short and says where to look: at the file and line, or at a setting."""
    parts = {part for place in drawn for part in place.split(".")} - {"engine"}
    places = [place for place, _ in kind.settings if place != "engine"]
    if not any(name in message for name in (*parts, *places, "override 'engine=", recipe.name)):
        raise ChangedError(f"the message names no setting: {message}")
    if len(message) > LONGEST_MESSAGE or "\x00" in message:
        raise ChangedError(f"a message of {len(message)} characters: {message[:200]}")
