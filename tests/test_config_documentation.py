"""Every setting is described, and the reference page says what the models say."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import pytest

import verl_async
import verl_fsdp
from docs.generate_config_reference import PAGE, render
from verl_engine.contract.strict_model import StrictModel

if TYPE_CHECKING:
    from collections.abc import Iterator

for package in (verl_async, verl_fsdp):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name.endswith(".config"):
            importlib.import_module(module.name)


def config_classes(root: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for subclass in root.__subclasses__():
        if subclass.__module__.startswith("verl_"):
            yield subclass
            yield from config_classes(subclass)


@pytest.mark.parametrize("config_class", list(config_classes()), ids=lambda config_class: config_class.__name__)
def test_every_setting_is_described(config_class: type[StrictModel]) -> None:
    assert config_class.__doc__
    # A job's sections are described by their own classes.
    is_job = config_class.__name__.endswith("Job")
    undescribed = [name for name, field in config_class.model_fields.items() if not field.description and not is_job]
    assert undescribed == []


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/generate_config_reference.py"
