"""Draws, their requests and seeds, and the versions of a finished group."""

from __future__ import annotations

from dataclasses import replace

from plugins.verl_async.tests.fakes import encoded_prompts, make_group
from verl_async.orchestrator.samples import PromptInstance, stream_seed
from verl_async.orchestrator.workflow import Trajectory
from verl_async.rollout.interface import Generation


def test_each_sample_and_each_call_of_it_has_its_own_stream() -> None:
    instance = PromptInstance(5, encoded_prompts(1)[0])
    seeds = {instance.seed(7, place, call) for place in range(3) for call in range(3)}
    assert len(seeds) == 9
    assert instance.seed(7, 2) == instance.seed(7, 2, 0) == stream_seed(7, 5, 2)


def test_the_same_prompt_drawn_again_gives_other_samples() -> None:
    first, again = (PromptInstance(number, encoded_prompts(1)[0]) for number in (0, 1))
    assert first.seed(7, 0) != again.seed(7, 0)


def test_seeds_are_reproducible_and_fit_a_torch_generator() -> None:
    assert stream_seed(0, 0, 0) == 172567792699466427
    seeds = {stream_seed(seed, number, place) for seed in range(10) for number in range(10) for place in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_samples_are_named_by_draw_and_place() -> None:
    assert PromptInstance(12, encoded_prompts(1)[0]).sample_id(3) == "12-3"


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    generations = (Generation([1, 2, 3], [-1.0] * 3, [4, 4, 6], "stop"), Generation([1], [-1.0], [5], "stop"))
    group = replace(make_group(), trajectories=tuple(Trajectory((one,)) for one in generations))
    assert (group.oldest_version, group.newest_version) == (4, 6)
