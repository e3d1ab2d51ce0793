from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine import ConfigError, UnknownPluginError, validate_engine_section
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def toy(site: Path) -> Path:
    points = {BACKENDS_GROUP: {"toy": "toy_hooks"}}
    write_distribution(site, "toy-engine", points, modules={"toy_hooks": HOOKS.format(name="toy")})
    return site


@pytest.mark.usefixtures("toy")
def test_the_backends_own_class_validates_the_section() -> None:
    config = validate_engine_section({"backend": "toy", "learning_rate": 0.5, "width": 9})
    assert type(config).__name__ == "ToyConfig"
    assert config.model_dump()["width"] == 9


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"learning_rate": 0.5}, r"^engine\.backend is missing; write engine\.backend=NAME, .*: .*\btoy\b"),
        ({"backend": 3}, r"^engine\.backend=3 must be a name; write"),
        ("toy", r"^engine='toy' must be a section with at least engine\.backend=NAME"),
        ({"backend": "toy", "learning_rate": 0}, r"^engine\.learning_rate=0: must be greater than 0$"),
        (
            {"backend": "toy", "learning_rate": 1, "widht": 3},
            r"^engine\.widht is not a known key; did you mean engine\.width\?$",
        ),
        (
            {"backend": "toy", "learning_rate": 1, "warmup_steps": 5, "total_steps": 5},
            r"^engine: warmup_steps=5 must be below total_steps=5$",
        ),
    ],
)
def test_a_wrong_section_is_refused(section: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_engine_section(section)


@pytest.mark.usefixtures("toy")
def test_a_slip_in_the_backends_name_names_the_field() -> None:
    with pytest.raises(UnknownPluginError, match=r"^engine\.backend='toyy' is not a known backend; did you mean toy\?"):
        validate_engine_section({"backend": "toyy"})


def test_without_any_backend_the_first_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"engine\.backend is missing; .*: python -m pip install .*verl.fsdp$"):
        validate_engine_section({})
