"""Rotary frequencies that follow the longest sequence of a micro-batch must not change the others' log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers

from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.tiny_models import tiny_config
from verl_fsdp.forward.rotary import PositionUse, rotary_limit

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

LIMIT: Final = 8


def build(kind: str, **rope: Any) -> transformers.PreTrainedModel:
    config: transformers.PreTrainedConfig
    sizes = {name: size for name, size in tiny_config().items() if name != "head_dim"}
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config = transformers.LlamaConfig(**{**sizes, "max_position_embeddings": LIMIT}, rope_parameters=rope)
    else:
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0], **rope}
        rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **factors}
        config = transformers.Phi3Config(**sizes, original_max_position_embeddings=LIMIT, rope_parameters=rope)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def test_own_positions_are_refused_where_a_model_takes_none() -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    bloom = PositionUse(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)))
    with pytest.raises(ModelError, match="sequences have positions of their own, and BloomForCausalLM takes none"):
        bloom.check(torch.zeros(3, dtype=torch.int64))
    PositionUse(build("dynamic")).check(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_limit_is_the_length_that_the_model_was_made_for(kind: str) -> None:
    limit = rotary_limit(build(kind))
    assert limit is not None
    assert (limit.rope_type, limit.num_tokens) == (kind, LIMIT)
    limit.check([1, LIMIT])
    with pytest.raises(ModelError, match=rf"9 tokens, and beyond {LIMIT}.*rope_type={kind}.*config\.json"):
        limit.check([1, LIMIT + 1])


def test_frequencies_that_stay_have_no_limit() -> None:
    assert rotary_limit(build("longrope", short_factor=[3.0, 4.0, 5.0, 6.0])) is None
    with torch.device("meta"):
        assert rotary_limit(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**tiny_config()))) is None


def infer(rank: int, folder: Path, lengths: range, settings: dict[str, Any]) -> list[torch.Tensor]:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", **settings}
    sequences = [sequence for sequence in make_sequences(32) if len(sequence) in lengths]
    return Driver(section, folder, rank, 2).infer(sequences)


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"packing": False}, {"sequence_parallel_size": 2}])
def test_a_sequence_that_would_change_those_beside_it_is_refused(
    tmp_path: Path, settings: dict[str, Any], on_ranks: OnRanks
) -> None:
    build("longrope").save_pretrained(tmp_path)
    found = on_ranks(infer, tmp_path, range(LIMIT + 1), settings)
    plain = load_reference(tmp_path)
    for sequence, log_probs in zip((s for s in make_sequences(32) if len(s) <= LIMIT), found[1], strict=True):
        torch.testing.assert_close(log_probs, masked_log_probs(plain, sequence), rtol=0, atol=5e-6)
    with pytest.raises(AssertionError, match="log-probs would depend on how the batch is divided"):
        on_ranks(infer, tmp_path, range(LIMIT + 2), settings)
