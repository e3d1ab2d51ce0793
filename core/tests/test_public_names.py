from __future__ import annotations

import subprocess
import sys

import pytest

import verl_engine


@pytest.mark.parametrize("name", verl_engine.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(verl_engine, name) is not None
    assert name in dir(verl_engine)


def test_the_table_of_homes_and_all_agree() -> None:
    names = [name for home in verl_engine._HOMES.values() for name in home]
    errors = [name for name in verl_engine.__all__ if name.endswith("Error")]  # imported at once: they cost nothing
    assert sorted([*names, *errors, "__version__"]) == sorted(verl_engine.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'verl_engine' has no attribute 'Engin'"):
        verl_engine.Engin  # noqa: B018 - asking for it is the test


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import verl_engine", ["pluggy", "pydantic", "numpy", "omegaconf", "typing", "importlib.metadata"]),
        ("from verl_engine import hookimpl, BackendSpec, Capabilities, OptimizerStep", ["pydantic", "numpy"]),
        (
            "from verl_engine import BackendHost, validate_engine_section, EngineConfig, read_config, validate",
            ["numpy"],
        ),
        ("from verl_engine import Sequence", []),
    ],
)
def test_names_pull_in_no_more_than_they_need(code: str, absent: list[str]) -> None:
    forbidden = ["torch", "transformers", "ray", *absent]
    check = f"{code}; import sys; print([name for name in {forbidden!r} if name in sys.modules])"
    # -S: without the site packages' own start-up files, which may import something themselves.
    path = f"import sys; sys.path += {sys.path!r}; "
    done = subprocess.run([sys.executable, "-S", "-c", path + check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
