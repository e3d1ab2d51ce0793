"""What the page on extension points shows works as it stands there, from outside of the repository."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.end_to_end import run
from tests.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Task

PAGE = (ROOT / "docs" / "how-to" / "extension-points.md").read_text(encoding="utf-8")


@pytest.mark.dist
@pytest.mark.slow
def test_a_job_with_the_advantage_and_the_loss_of_the_page(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    (module,), (section,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "my_algorithms.py").write_text(module, encoding="utf-8")
    recipe = json.loads(task.train.read_text(encoding="utf-8")) | yaml.safe_load(section)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    ended = run("train", tmp_path / "recipe.yaml", tmp_path / "out", "engine.entropy=value", cluster=cluster)
    steps = ended.records("step")
    assert len(steps) == 3
    assert all(step["drift"] == pytest.approx(0, abs=1e-4) or step["staleness_max"] > 0 for step in steps)
    assert steps[0]["kl"] == 0, "the policy is the reference"
    assert all(step["kl"] > 0 for step in steps[1:])
    assert all(step["entropy"] > 0 for step in steps)
    config = yaml.safe_load((ended.output / "config.yaml").read_text(encoding="utf-8"))
    assert config["algorithm"]["loss_config"] == {"bound": 0.25}
