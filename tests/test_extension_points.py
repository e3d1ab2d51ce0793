"""What the page on extension points shows works as it stands there, from outside of the repository."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.end_to_end import run
from tests.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Task

PAGE = (ROOT / "docs" / "how-to" / "extension-points.md").read_text(encoding="utf-8")


MODULES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
ALGORITHM, ROLLOUT = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user's own modules are."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.dist
@pytest.mark.slow
def test_a_job_with_the_advantage_the_loss_and_the_environment_of_the_page(
    task: Task, folder: Path, cluster: Cluster
) -> None:
    recipe = json.loads(task.train.read_text(encoding="utf-8")) | ALGORITHM
    recipe["rollout"] |= ROLLOUT["rollout"] | {"max_response_tokens": 12, "n": 8}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    ended = run("train", folder / "recipe.yaml", folder / "out", "engine.entropy=value", cluster=cluster)
    steps = ended.records("step")
    assert len(steps) == 3
    assert all(step["drift"] == pytest.approx(0, abs=1e-4) or step["staleness_max"] > 0 for step in steps)
    assert steps[0]["kl"] == 0, "the policy is the reference"
    assert all(step["kl"] > 0 for step in steps[1:])
    assert all(step["entropy"] > 0 for step in steps)
    config = yaml.safe_load((ended.output / "config.yaml").read_text(encoding="utf-8"))
    assert config["algorithm"]["loss_config"] == {"bound": 0.25}
    assert config["rollout"]["workflow_config"]["max_turns"] == 3


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_with_the_workflow_of_the_page(task: Task, folder: Path, cluster: Cluster) -> None:
    recipe = json.loads(task.train.read_text(encoding="utf-8"))
    recipe["rollout"]["workflow"] = "my_workflow:SecondThought"
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    ended = run("train", folder / "recipe.yaml", folder / "out", cluster=cluster)
    assert len(ended.records("step")) == 3
    assert all(step["response_tokens"] <= 8 for step in ended.records("step"))


def test_the_example_has_the_calculator_of_the_page() -> None:
    from examples.calculator import Calculator

    own: dict[str, Any] = {}
    exec(MODULES["my_environment"], own)  # noqa: S102 - the page's own code

    async def replies(environment: Any) -> list[str | None]:
        return [await environment.step(text) for text in ("47+85=", "1 2+3=", "47+85", "=", "")]

    found = asyncio.run(replies(Calculator()))
    assert found == ["132", "5", None, None, None]
    assert asyncio.run(replies(own["Calculator"]())) == found
