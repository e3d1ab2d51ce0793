"""Tokens through given experts, where the kit's model is too small or its settings do not reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import new_driver
from verl_engine.contract.errors import ConfigError, EngineError, ModelError
from verl_engine.contract.validation import validate
from verl_engine.testing.tiny_models import write_tiny_mixture
from verl_megatron_mindspeed.config import MegatronConfig

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

STAGES: Final[dict[str, Any]] = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
CASES: Final[dict[str, dict[str, Any]]] = {
    "interleaved stages": STAGES,
    "interleaved stages, recomputed": {**STAGES, "recompute": "full", "recompute_method": "block"},
}


def replay(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[float, float, bool]:
    """Compare with a mixture computed by hand: log-probs, the gradient, and whether the experts were those."""
    import torch

    from verl_engine.testing.conformance import router_replay
    from verl_engine.testing.conformance.gradient_probe import PROBE_SETTINGS, GradientProbe
    from verl_engine.testing.conformance.reference import furthest, load_reference, make_sequences, relative_error

    probe = GradientProbe(lambda: new_driver(folder, rank, **PROBE_SETTINGS, router_replay=True, **settings), {})
    sequences = router_replay.with_experts(make_sequences(8), num_layers=4)
    log_probs, gradient = router_replay.by_hand(load_reference(folder), sequences)
    found = probe.driver.outputs(sequences, ("log_probs", "routed_experts"))
    _, worst = furthest({i: each["log_probs"] for i, each in enumerate(found)}, dict(enumerate(log_probs)))
    pairs = [
        (outputs["routed_experts"], torch.from_numpy(sequence.fields["routed_experts"]))
        for outputs, sequence in zip(found, sequences, strict=True)
    ]
    is_given = all(bool(((mine == given) | (given < 0)).all()) for mine, given in pairs)
    expected = router_replay.by_expert(gradient)
    return worst, relative_error(router_replay.by_expert(probe.gradient_of(sequences, 3)), expected), is_given


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_stages_that_run_micro_batches_through_each_other_keep_their_experts_apart(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    folder = write_tiny_mixture(tmp_path / "model", num_layers=4)
    for worst, distance, is_given in ranks.run(replay, folder, CASES[name]):
        assert worst < 1e-5
        assert distance < 1e-5
        assert is_given


def build_dense(rank: int, folder: Path) -> str:
    try:
        new_driver(folder, rank, router_replay=True)
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.dist
def test_a_model_without_experts_is_refused(ranks: RankPool, model_folder: Path) -> None:
    for message in ranks.run(build_dense, model_folder):
        assert message.startswith(f"{ModelError.__name__}: engine.router_replay=true: ")


@pytest.mark.parametrize("option", ["moe_router_fusion", "moe_expert_capacity_factor"])
def test_what_would_not_keep_to_given_experts_is_refused(option: str) -> None:
    section = {"backend": "megatron", "router_replay": True, "transformer_options": {option: 1}}
    with pytest.raises(ConfigError, match=f"transformer_options.{option} and router_replay=true"):
        validate(MegatronConfig, section, at="engine")
