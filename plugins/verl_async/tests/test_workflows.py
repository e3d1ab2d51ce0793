"""What becomes of a prompt: single turns, conversations with an environment, and workflows of a user's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugins.verl_async.tests.fakes import encoded_prompts, make_scorer
from verl_async.config import RolloutConfig
from verl_async.errors import WorkflowError
from verl_async.orchestrator.batches import build_sequences
from verl_async.orchestrator.routed_experts import experts_of_trajectory
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.samples import PromptInstance
from verl_async.orchestrator.workflow import SingleTurn, Trajectory, load_workflow
from verl_async.rollout.interface import Generation, SamplingParams
from verl_engine.contract.errors import ConfigError, StuckError
from verl_engine.contract.strict_model import StrictModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.data.prompts import Prompt
    from verl_async.orchestrator.samples import ScoredGroup
    from verl_async.orchestrator.workflow import Workflow, WorkflowClient
    from verl_async.rollout.interface import GenerationRequest

_HERE = "plugins.verl_async.tests.test_workflows"


class CountingLane:
    """Answers a context with the tokens counted up from its last one."""

    def __init__(self, num_tokens: int = 2, delays_s: Sequence[float] = ()) -> None:
        self.num_tokens = num_tokens
        self.delays_s = list(delays_s)
        self.requests: list[GenerationRequest] = []
        self.num_closed = 0
        self.lacks_experts = False

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self.delays_s.pop(0) if self.delays_s else 0.0)
        number = min(self.num_tokens, request.sampling.max_new_tokens)
        tokens = [request.prompt_ids[-1] + 1 + place for place in range(number)]
        reason = "stop" if number == self.num_tokens else "length"
        experts = None
        if request.routed_experts_from is not None and not self.lacks_experts:
            read = [*request.prompt_ids, *tokens][request.routed_experts_from : -1]
            experts = (100 * len(self.requests) + np.array(read, np.int16))[:, None, None]
        return Generation(
            tokens, [-1.0 * token for token in tokens], [len(self.requests)] * number,
            reason, experts,  # type: ignore[arg-type]
        )  # fmt: skip

    def close(self) -> None:
        self.num_closed += 1


class Echo:
    """Replies with twice the last number, until that is above a bound."""

    class Config(StrictModel):
        bound: int = 1000

    def __init__(self, config: Config) -> None:
        self.config = config

    def reset(self, prompt: Prompt) -> None:
        self.row = prompt.index

    async def step(self, response: str) -> str | None:
        last = int(response.rsplit(maxsplit=1)[-1])
        return None if last > self.config.bound else str(2 * last)


class Hanging:
    """A workflow and an environment that waits for ever in one of its calls."""

    class Config(StrictModel):
        where: str

    def __init__(self, config: Config) -> None:
        self.where = config.where

    async def wait(self, where: str) -> None:
        await asyncio.sleep(60 if self.where == where else 0)

    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        await client.generate(token_ids)
        await self.wait("run")
        return [Trajectory((await client.generate(token_ids),))]

    async def reset(self, _: Prompt) -> None:
        await self.wait("reset")

    async def step(self, _: str) -> None:
        await self.wait("step")


class TwoTries:
    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        return [Trajectory((await client.generate(token_ids),)) for _ in range(2)]


class Broken:
    class Config(StrictModel):
        what: str

    def __init__(self, config: Config) -> None:
        self.what = config.what

    async def run(self, *_: object) -> Any:
        if self.what == "raise":
            raise KeyError("no such tool")
        return {"none": [], "text": "answer", "empty": [Trajectory((Generation(),))]}[self.what]


def multi_turn(**settings: Any) -> Workflow:
    config = {"environment": f"{_HERE}:Echo", **settings}
    made: Workflow = load_workflow(RolloutConfig(workflow="multi_turn", workflow_config=config)).made
    return made


def run(
    workflow: Workflow,
    lane: CountingLane,
    max_new_tokens: int = 100,
    num_samples: int = 1,
    timeout_s: float = 60.0,
    *,
    with_experts: bool = False,
) -> ScoredGroup:
    sampling = SamplingParams(max_new_tokens, stop_token_ids=(7,))
    sampler = Sampler(workflow, make_scorer(len), sampling, 3, timeout_s=timeout_s, with_experts=with_experts)
    return asyncio.run(sampler.group(PromptInstance(5, encoded_prompts(1)[0]), [lane] * num_samples))


@pytest.fixture(autouse=True)
def tokens_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply of a text of numbers is those tokens."""
    monkeypatch.setattr(
        "verl_async.orchestrator.sampler.reply_tokens",
        lambda _, reply, last_token, settings: tuple(int(word) for word in reply.split()),  # noqa: ARG005
    )


def test_a_single_turn_is_one_response() -> None:
    lane = CountingLane()
    group = run(SingleTurn(), lane, num_samples=3)
    assert [one.token_ids for one in group.trajectories] == [[11, 12]] * 3
    assert (lane.num_closed, len({request.seeds for request in lane.requests})) == (3, 3)
    assert {request.affinity_key for request in lane.requests} == {""}


def test_a_conversation_worked_by_hand() -> None:
    """Prompt 10 10; the model counts: 11 12; reply 24; then 25 26; reply 52; then 53 54, above the bound."""
    lane = CountingLane()
    group = run(multi_turn(environment_config={"bound": 50}, stop_strings=("?",)), lane)
    [found] = group.trajectories
    assert found.token_ids == [11, 12, 24, 25, 26, 52, 53, 54]
    assert found.in_loss == [True, True, False, True, True, False, True, True]
    assert found.log_probs == [-11.0, -12.0, -25.0, -26.0, -53.0, -54.0]
    assert found.weight_versions == [1, 1, 2, 2, 3, 3]
    assert [request.prompt_ids for request in lane.requests[:2]] == [(10, 10), (10, 10, 11, 12, 24)]
    assert [request.sampling.max_new_tokens for request in lane.requests] == [100, 97, 94]
    assert {request.sampling.stop_strings for request in lane.requests} == {("?",)}
    assert {request.sampling.stop_token_ids for request in lane.requests} == {(7,)}
    assert {request.affinity_key for request in lane.requests} == {"5-0"}
    assert len({request.seeds for request in lane.requests}) == 3
    assert group.rewards == (float(len("11 12 24 25 26 52 53 54")),), "the whole text is scored"
    assert not group.is_partial, "new weights between two turns interrupt no response"


def test_experts_of_a_conversation_worked_by_hand() -> None:
    """A turn is asked for those of the tokens that the turns before it did not read: their last token, and the rest."""
    lane = CountingLane()
    group = run(multi_turn(environment_config={"bound": 20}), lane, with_experts=True)
    assert [request.routed_experts_from for request in lane.requests] == [0, 3]
    [sequence] = build_sequences([group], (), "rollout", with_experts=True)
    assert sequence.token_ids.tolist() == [10, 10, 11, 12, 24, 25, 26]
    found = sequence.fields["routed_experts"]
    assert found.shape == (7, 1, 1)
    assert found.dtype == np.int16
    assert found.flatten().tolist() == [110, 110, 111, 212, 224, 225, 225], "nobody read the last token"
    assert "routed_experts" not in build_sequences([group], (), "rollout")[0].fields
    tries = build_sequences([run(TwoTries(), lane, with_experts=True)], (), "rollout", with_experts=True)
    assert [one.fields["routed_experts"].flatten().tolist() for one in tries] == [
        [310, 310, 311, 311], [410, 410, 411, 411]
    ]  # fmt: skip


def test_a_trajectory_whose_experts_nobody_said_is_refused() -> None:
    lane = CountingLane()
    lane.lacks_experts = True
    group = run(SingleTurn(), lane, with_experts=True)
    with pytest.raises(WorkflowError, match="router_replay=true: sample 5-0: its generations say the experts of 0 t"):
        build_sequences([group], (), "rollout", with_experts=True)
    lane.lacks_experts = False
    [conversation] = run(multi_turn(environment_config={"bound": 20}), lane, with_experts=True).trajectories
    first, reply, last = conversation.turns
    assert isinstance(first, Generation)
    as_tokens = Trajectory((tuple(first.token_ids), reply, last))
    with pytest.raises(WorkflowError, match="experts of 0 tokens from the first on, and then of tokens 3 to 6"):
        experts_of_trajectory(2, as_tokens, "5-0")


def test_only_what_the_model_drew_is_in_the_loss() -> None:
    group = run(multi_turn(environment_config={"bound": 20}), CountingLane())
    [sequence] = build_sequences([group], (), "rollout")
    assert sequence.token_ids.tolist() == [10, 10, 11, 12, 24, 25, 26]
    assert sequence.loss_mask.tolist() == [False, False, True, True, False, True, True]
    expected = np.array([0, 0, -11, -12, 0, -25, -26], np.float32)
    assert all((sequence.fields[name] == expected).all() for name in ("rollout_log_probs", "old_log_probs"))


@pytest.mark.parametrize(
    ("max_new_tokens", "settings", "tokens"),
    [
        (100, {"max_turns": 1}, [11, 12]),
        (100, {"max_turns": 2}, [11, 12, 24, 25, 26]),
        (5, {}, [11, 12, 24, 25, 26]),  # nothing is left for the reply
        (4, {}, [11, 12, 24, 25]),
        (3, {}, [11, 12]),  # the reply would be the last token
        (1, {}, [11]),
    ],
)
def test_a_conversation_ends_where_its_limits_are(
    max_new_tokens: int, settings: dict[str, Any], tokens: list[int]
) -> None:
    [found] = run(multi_turn(**settings), CountingLane(), max_new_tokens).trajectories
    assert found.token_ids == tokens
    assert len(found.token_ids) <= max_new_tokens


@pytest.mark.parametrize("where", ["run", "reset", "step"])
def test_a_workflow_or_environment_that_hangs_is_named_with_the_sample(where: str) -> None:
    settings = {"where": where}
    own = load_workflow(RolloutConfig(workflow=f"{_HERE}:Hanging", workflow_config=settings)).made
    workflow = own if where == "run" else multi_turn(environment=f"{_HERE}:Hanging", environment_config=settings)
    lane = CountingLane()
    message = r"sample 5-0 \(prompt row 0\) did not go on within 0\.05 s \(rollout\.workflow_timeout_s\)"
    with pytest.raises(StuckError, match=message):
        run(workflow, lane, timeout_s=0.05)
    assert lane.num_closed == 1


class TwoAtOnce:
    """Asks for two turns at once, and has more to wait for when the first of them is there."""

    async def run(self, prompt: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        del prompt
        turns = await asyncio.gather(*(client.generate(token_ids) for _ in range(2)))
        return [Trajectory((turn,)) for turn in turns]


def test_the_limit_of_a_workflow_does_not_count_turns_of_the_model_of_which_several_may_run() -> None:
    found = run(TwoAtOnce(), CountingLane(delays_s=[0.0, 1.2]), timeout_s=1.0).trajectories
    assert [one.token_ids for one in found] == [[11, 12]] * 2


def test_a_sample_may_become_several_trajectories() -> None:
    group = run(load_workflow(RolloutConfig(workflow=f"{_HERE}:TwoTries")).made, CountingLane(), num_samples=2)
    assert len(group.trajectories) == len(group.rewards) == 4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"sample 5-0 \(prompt row 0\) raised KeyError: 'no such tool'"),
        ("none", r"returned \[\]; expected a list of Trajectory"),
        ("text", r"returned 'answer'; expected"),
        ("empty", r"expected a list of Trajectory, each with a turn of the model"),
    ],
)
def test_a_broken_workflow_is_named_with_the_sample(what: str, message: str) -> None:
    lane = CountingLane()
    config = RolloutConfig(workflow=f"{_HERE}:Broken", workflow_config={"what": what})
    with pytest.raises(WorkflowError, match=message):
        run(load_workflow(config).made, lane)
    assert lane.num_closed == 1


class Blocking:
    def reset(self, prompt: Prompt) -> None:
        """Nothing."""

    def step(self, response: str) -> str:
        return response


@pytest.mark.parametrize(
    ("workflow", "settings", "message"),
    [
        ("multi_turns", {}, "must be single_turn, multi_turn, or module:attribute"),
        ("multi_turn", {}, "rollout.workflow_config.environment is missing"),
        ("multi_turn", {"environment": "a b"}, "environment=a b: must be module:attribute"),
        ("multi_turn", {"environment": "no_such_module:Env"}, "module no_such_module cannot be imported"),
        ("multi_turn", {"environment": f"{_HERE}:Blocking"}, r"with the methods reset\(prompt\) and async step"),
        (
            "multi_turn",
            {"environment": f"{_HERE}:Echo", "environment_config": {"bond": 1}},
            "^rollout.workflow_config.environment_config.bond is not a known key",
        ),
        ("single_turn", {"max_turns": 3}, "takes no settings"),
        (f"{_HERE}:Echo", {}, r"expected a class with the method async run\(prompt, token_ids, client\)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    workflow: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        load_workflow(RolloutConfig(workflow=workflow, workflow_config=settings))
