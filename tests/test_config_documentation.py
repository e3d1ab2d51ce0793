"""Every setting is described, and the reference page says what the models say."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Annotated, get_args, get_origin

import pytest
from pydantic import BaseModel

from docs.generate_config_reference import BACKENDS, PAGE, render
from tests.repository import PACKAGES
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import list_plugins

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = [package.name.replace("core", "verl_engine") for package in PACKAGES]
for name in OURS:
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
        if module.name.endswith("config"):
            importlib.import_module(module.name)


def config_classes(root: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for subclass in root.__subclasses__():
        if not hasattr(sys.modules[subclass.__module__], subclass.__name__):
            continue  # made for a trial, and not collected as garbage yet
        # What is below `verl_engine.engine` describes files, such as a checkpoint's manifest, and not settings.
        if subclass.__module__.startswith("verl_") and not subclass.__module__.startswith("verl_engine.engine."):
            yield subclass
            yield from config_classes(subclass)


@pytest.mark.parametrize("config_class", list(config_classes()), ids=lambda config_class: config_class.__name__)
def test_every_setting_is_described(config_class: type[BaseModel]) -> None:
    assert config_class.__doc__
    # A job's sections are described by their own classes.
    is_job = config_class.__name__.endswith("Job")
    undescribed = [name for name, field in config_class.model_fields.items() if not field.description and not is_job]
    assert undescribed == []


@pytest.mark.parametrize("config_class", list(config_classes()), ids=lambda config_class: config_class.__name__)
def test_every_setting_is_in_the_reference(config_class: type[BaseModel]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in config_class.model_fields if f".{name}` |" not in page and f"| `{name}` |" not in page]
    assert missing == []


def test_every_backend_of_ours_has_a_section() -> None:
    ours = {entry.name for entry in list_plugins(BACKEND) if entry.distribution.replace("-", "_") in OURS}
    assert ours == BACKENDS.keys()


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/generate_config_reference.py"


def integers_without_bound(annotation: object, metadata: tuple[object, ...]) -> bool:
    """Tell whether an integer somewhere in a type has no upper bound."""
    inner, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    found = (*metadata, *(item for part in more for item in getattr(part, "metadata", ())))
    if inner is int:
        return not any(hasattr(item, "le") or hasattr(item, "lt") for item in found)
    return any(integers_without_bound(part, found) for part in get_args(inner))


@pytest.mark.fault(22)
@pytest.mark.parametrize("config_class", list(config_classes()), ids=lambda config_class: config_class.__name__)
def test_every_integer_has_an_upper_bound(config_class: type[BaseModel]) -> None:
    handed_on = {"features"}  # to a framework, by its own names
    fields = {name: field for name, field in config_class.model_fields.items() if name not in handed_on}
    without = [name for name, field in fields.items() if integers_without_bound(field.annotation, (*field.metadata,))]
    assert without == []
