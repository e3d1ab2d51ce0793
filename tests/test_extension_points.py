"""What the page on extension points shows works as it stands there, from outside of the repository."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.tests.fake_distributions import write_distribution
from tests.end_to_end import run
from tests.repository import ROOT
from verl_async.rollout.kind import ROLLOUT as ROLLOUT_KIND

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end import Cluster, Task

PAGE = (ROOT / "docs" / "how-to" / "extension-points.md").read_text(encoding="utf-8")


MODULES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
REWARD, ALGORITHM, ROLLOUT = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user's own modules are."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def installed(cluster: Cluster) -> Iterator[None]:
    """Install the rollout engine of the page for the cluster."""
    own = {name: MODULES[name] for name in ("my_rollouts", "my_recording")}
    points = {ROLLOUT_KIND.group: {"recording": "my_rollouts"}}
    keywords = [f"{ROLLOUT_KIND.api_keyword}{ROLLOUT_KIND.api_version}"]
    write_distribution(cluster.site, "mine", points, keywords=keywords, modules=own)
    yield
    shutil.rmtree(cluster.site)
    cluster.site.mkdir()


EITHER = """
from my_workflow import SecondThought
from verl_async.orchestrator.multi_turn import MultiTurn, MultiTurnConfig

class Either:  # the page's workflow for odd sums; for even ones its environment, whose replies are written down
    Config = MultiTurnConfig
    features = ("stop_strings",)

    def __init__(self, config):
        self.talk, self.think = MultiTurn(config), SecondThought()

    async def run(self, prompt, token_ids, client):
        if prompt.extra_info["a"] % 2:
            return await self.think.run(prompt, token_ids, client)
        [found] = await self.talk.run(prompt, token_ids, client)
        with open("replies.txt", "a") as file:
            for turn, reply in zip(found.turns, found.turns[1:]):
                if isinstance(reply, tuple):
                    print(client.text(turn.token_ids), client.text(reply), file=file)
        return [found]
"""


def write_caller(folder: Path, out: Path) -> None:
    """Write a model whose next token depends on the last alone, such that it often writes a sum."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                weight.zero_()
        model.get_input_embeddings().weight[:, : len(tokenizer)].fill_diagonal_(1.0)
        for last, following in {"=": "0123456789", "+": "0123456789", **dict.fromkeys("0123456789", "+=")}.items():
            for token in following:
                row, column = tokenizer.convert_tokens_to_ids([token, last])
                model.lm_head.weight[row, column] = 0.5
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_job_with_every_part_of_the_page(task: Task, folder: Path, cluster: Cluster) -> None:
    """Its reward, advantage, loss, workflow, environment and rollout engine."""
    recipe = json.loads(task.train.read_text(encoding="utf-8")) | REWARD | ALGORITHM
    write_caller(task.model, folder / "caller")
    (folder / "either.py").write_text(EITHER, encoding="utf-8")
    own = {"backend": "recording", "record": str(folder / "record.txt"), "workflow": "either:Either"}
    recipe["model"]["path"] = str(folder / "caller")
    recipe["rollout"] |= ROLLOUT["rollout"] | own | {"max_response_tokens": 12, "n": 8}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    ended = run("train", folder / "recipe.yaml", folder / "out", "engine.entropy=value", cluster=cluster)
    steps = ended.records("step")
    assert len(steps) == 3
    assert all(step["drift"] == pytest.approx(0, abs=1e-4) or step["staleness_max"] > 0 for step in steps)
    assert steps[0]["kl"] == 0, "the policy is the reference"
    assert all(step["kl"] > 0 for step in steps[1:])
    assert all(step["entropy"] > 0 and step["reward/calls"] > 0 for step in steps)
    config = yaml.safe_load((ended.output / "config.yaml").read_text(encoding="utf-8"))
    assert config["algorithm"]["loss_config"] == {"bound": 0.25}
    assert config["rollout"]["workflow_config"]["max_turns"] == 3
    replies = [line.split() for line in (folder / "replies.txt").read_text(encoding="utf-8").splitlines()]
    assert len(replies) > 0
    for turn, reply in replies:
        first, second = re.findall(r"(\d+)\+(\d+)=$", turn)[0]
        assert int(reply) == int(first) + int(second)
    assert len((folder / "record.txt").read_text(encoding="utf-8").splitlines()) >= 3 * 4 * 8


def test_the_example_has_the_calculator_of_the_page() -> None:
    from examples.calculator import Calculator

    own: dict[str, Any] = {}
    exec(MODULES["my_environment"], own)  # noqa: S102 - the page's own code

    async def replies(environment: Any) -> list[str | None]:
        return [await environment.step(text) for text in ("47+85=", "1 2+3=", "47+85", "=", "")]

    found = asyncio.run(replies(Calculator()))
    assert found == ["132", "5", None, None, None]
    assert asyncio.run(replies(own["Calculator"]())) == found
