"""A trainer follows the experts of a rollout whose own routers, off by less than rounding, chose others."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from plugins.verl_async.tests.fakes import encoded_prompts, make_scorer
from tests.end_to_end import run
from tests.test_end_to_end_train import check_training
from tests.test_router_replay import OTHERS, REFUSED, SELECTION, load
from verl_async.orchestrator.batches import build_sequences
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.samples import PromptInstance
from verl_async.orchestrator.workflow import SingleTurn, Trajectory
from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import SamplingParams
from verl_async.rollout.reading import find_reading, reader
from verl_async.rollout.routes import RouteRecorder, RowRoutes
from verl_engine.contract.errors import ModelError
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.reference import largest_difference
from verl_engine.testing.tiny_models import tiny_config
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from tests.end_to_end import Cluster, Task
    from verl_async.data.prompts import Prompt
    from verl_async.orchestrator.workflow import Workflow, WorkflowClient
    from verl_async.rollout.interface import Generation, GenerationRequest
    from verl_engine.batch.sequence import Sequence
    from verl_engine.engine.token_output import OutputName


def write_model(folder: Path, shift: float, vocab_size: int = 32) -> Path:
    """Write a mixture in which every second expert has the same score as the one before it, but for `shift`."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "initializer_range": 0.3,
    }
    config = Qwen3MoeConfig(**{**tiny_config(), **sizes})
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1::2] = weight[::2] + shift * torch.randn(weight[::2].shape, generator=noise)
    model.save_pretrained(folder)
    return folder


class EngineLane:
    """Sends requests to an engine of this process."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    async def generate(self, request: GenerationRequest) -> Generation:
        return generate(self.engine, [request])[0]

    def close(self) -> None:
        """Nothing to close."""


class TwoTurns:
    """A conversation: the second turn reads only what is new."""

    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        first = await client.generate(token_ids, goes_on=True)
        second = await client.generate([*token_ids, *first.token_ids, 7, 8], goes_on=True)
        return [Trajectory((first, (7, 8), second))]


def rolled_out(folder: Path, workflow: Workflow) -> list[Sequence]:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu", routed_experts=True), folder)
    try:
        sampler = Sampler(workflow, make_scorer(len), SamplingParams(24), 3, with_experts=True)
        lanes: Any = [EngineLane(engine)] * 4
        group = asyncio.run(sampler.group(PromptInstance(0, encoded_prompts(1)[0]), lanes))
    finally:
        engine.close()
    return build_sequences([group], (), "rollout", with_experts=True)


@pytest.mark.parametrize("workflow", [SingleTurn, TwoTurns])
def test_a_trainer_goes_through_the_experts_of_the_rollout(workflow: type[Workflow], tmp_path: Path) -> None:
    sequences = rolled_out(write_model(tmp_path / "rollout", 1e-6), workflow())
    worker = EngineWorker(Fsdp2Config(device="cpu", router_replay=True), write_model(tmp_path / "model", -1e-6))
    worker.prepare((tmp_path / "store").as_uri())
    names: tuple[OutputName, ...] = ("log_probs", "routed_experts")
    try:
        worker.create()
        (found,) = worker.infer_outputs([sequences], names)
        own = [replace(one, fields={}) for one in sequences]
        (unaided,) = worker.infer_outputs([own], names)
    finally:
        worker.close()
    given = [one.fields["routed_experts"] for one in sequences]
    assert all(one.dtype == np.uint8 for one in given)
    assert all(np.array_equal(one["routed_experts"], right) for one, right in zip(found, given, strict=True))
    right = [torch.from_numpy(one.fields["rollout_log_probs"]) for one in sequences]
    assert largest_difference([torch.as_tensor(one["log_probs"]) for one in found], right) <= 1e-4
    off = largest_difference([torch.as_tensor(one["log_probs"]) for one in unaided], right)
    assert off > 0.1, "without replay it does not matter, so this test shows nothing"


QUICK = ("deepseek_v3", "qwen3_next")
"""The first layer is dense, experts are grouped; a recurrent state, so that a batch is read in another way."""
ARCHITECTURES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in (*SELECTION, *OTHERS)
]


@pytest.mark.filterwarnings("ignore")  # of all kinds, from transformers' models
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts_read_token_by_token_are_those_of_a_whole_forward(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path / "model")
    recorder = RouteRecorder(model)
    read = reader(model, find_reading(model), 2**12, recorder)
    contexts, drawn = [(3, 4, 5, 6), (3, 4, 5, 6), (9, 8, 7, 2)], [(5, 6, 7), (8, 9, 3)]
    found = [RowRoutes(0, None) for _ in contexts]
    with torch.inference_mode():
        for number in range(3):
            read.step(torch.tensor(drawn[number - 1])) if number else read.join(contexts)
            for routes, part in zip(found, read.routes, strict=True):
                routes.add(part, 4 + number)
        for place, (context, routes) in enumerate(zip(contexts, found, strict=True)):
            model(input_ids=torch.tensor([[*context, *(tokens[place] for tokens in drawn)]]), use_cache=False)
            own = routes.array()
            assert own is not None
            assert np.array_equal(np.sort(own), np.sort(recorder.last(1)[0]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in REFUSED])
def test_a_model_whose_experts_cannot_be_noted_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"engine.router_replay=true: .*; set it to false"):
        RouteRecorder(load(name, tmp_path / "model"))


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.slow
def test_a_job_replays_experts_in_all_forwards(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    folder = Path(shutil.copytree(task.model, tmp_path / "model"))
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    write_model(folder, 1e-5, vocab_size=vocabulary)
    ended = run(
        "train", task.train, tmp_path / "out", f"model.path={folder}", "engine.router_replay=true",
        "rollout.dtype=bfloat16", "rollout.num_workers=2", "algorithm.old_log_probs=recompute",
        "algorithm.kl.coefficient=0.01", "trainer.num_ranks=2", "trainer.num_steps=2", cluster=cluster,
    )  # fmt: skip
    check_training(ended, folder)
