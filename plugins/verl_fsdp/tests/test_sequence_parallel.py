"""Ranks that split the tokens of a micro-batch find what one rank finds: log-probs, gradients, steps.

Shape legend: T tokens of a micro-batch, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.sum_over_group import sum_over_group
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import (
    accumulate,
    load_reference,
    make_sequences,
    masked_log_probs,
    relative_error,
    weighted_loss,
)
from verl_engine.testing.rank_pool import RankError, RankPool
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.forward.attention import packed_attention
from verl_fsdp.forward.sequence_parallel import slice_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.conformance.driver import Split
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

TOLERANCE: Final = 1e-5  # the contract's; rounding alone makes 2e-6 on some processors
TINY: Final[dict[str, Any]] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: Final[dict[str, transformers.PreTrainedConfig]] = {
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=8),
    "llama_one_kv_head": transformers.LlamaConfig(**TINY | {"num_key_value_heads": 1}),
    "mistral_sliding": transformers.MistralConfig(**TINY, sliding_window=3, head_dim=8),
    "gpt2": transformers.GPT2Config(
        vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind of model, with weights large enough that attention matters."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for kind, folder in folders.items():
            model = transformers.AutoModelForCausalLM.from_config(MODELS[kind])
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    torch.nn.init.normal_(parameter, std=0.1)
            model.save_pretrained(folder)
    return folders


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


@pytest.fixture
def four_ranks(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(4)


def pack(*masks: str) -> PackedBatch:
    """Pack one sequence for each mask, such as ``.xx``: an x for each loss token. Token ids count up from 1."""
    ids = iter(range(1, 100))
    return PackedBatch.from_sequences(
        [Sequence(np.array([next(ids) for _ in mask]), np.array([mark == "x" for mark in mask])) for mask in masks]
    )


def sliced(rank: int, *masks: str) -> tuple[list[int], list[int], list[int], list[int], list[tuple[int, int, int]]]:
    del rank
    tokens = slice_tokens(pack(*masks), dist.group.WORLD)
    return (
        tokens.input_ids.tolist(),
        tokens.position_ids.tolist(),
        tokens.predictors.tolist(),
        tokens.loss_positions.tolist(),
        [(run.start, run.num_sequences, run.length) for run in tokens.runs],
    )


@pytest.mark.dist
def test_tokens_are_cut_in_equal_parts_and_filled_up_by_a_sequence_of_their_own(two_ranks: RankPool) -> None:
    # Seven tokens, 1 2 | 3 4 5 6 7, and one that fills them up.
    runs = [(0, 1, 2), (2, 1, 5), (7, 1, 1)]
    first, second = two_ranks.run(sliced, ".x", ".x.xx")
    assert first == ([1, 2, 3, 4], [0, 1, 0, 1], [0, 2], [1, 3], runs)
    # Token 4 (at index 5) is predicted from the last token before it, which is the second rank's first.
    assert second == ([5, 6, 7, 0], [2, 3, 4, 0], [0, 1], [5, 6], runs)


@pytest.mark.dist
def test_a_loss_token_belongs_to_the_rank_of_the_token_before_it(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(sliced, "..x.")  # cut before the loss token
    assert first[2:4] == ([1], [2])
    assert second[2:4] == ([], [])


@pytest.mark.dist
def test_an_empty_micro_batch_gives_every_rank_a_token(four_ranks: RankPool) -> None:
    for ids, positions, predictors, losses, runs in four_ranks.run(sliced, "."):
        assert len(ids) == len(positions) == 1
        assert predictors == losses == []
        assert runs == [(0, 1, 1), (1, 1, 3)]


def test_without_a_group_the_slice_is_all_there_is() -> None:
    batch = pack(".x", ".x.xx")
    tokens = slice_tokens(batch, None)
    assert tokens.input_ids is batch.input_ids
    assert tokens.predictors.tolist() == [0, 2, 4, 5]
    assert tokens.runs == batch.segment_runs


def summed_with_gradient(rank: int) -> tuple[list[float], list[float]]:
    """Rank 0 has (1, 0), rank 1 (0, 2); the loss is the square of each number."""
    own = torch.tensor([[1.0, 0.0], [0.0, 2.0]][rank], requires_grad=True)
    whole = sum_over_group(own, dist.group.WORLD)
    whole.square().sum().backward()
    assert own.grad is not None
    return whole.tolist(), own.grad.tolist()


@pytest.mark.dist
def test_numbers_are_summed_and_their_gradient_passes_unchanged(two_ranks: RankPool) -> None:
    assert two_ranks.run(summed_with_gradient) == [([1.0, 2.0], [2.0, 4.0])] * 2


def attention_error(rank: int, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> float:
    """Compare output and gradients of split tokens with those of all tokens at once."""
    generator = torch.Generator().manual_seed(0)
    batch = pack(".", "..", "..", ".....", "." * 10)
    whole_size = 20
    tokens = slice_tokens(batch, dist.group.WORLD)
    own = slice(rank * len(tokens.input_ids), (rank + 1) * len(tokens.input_ids))
    assert tokens.runs[-1].stop == whole_size, "nothing to fill up: the parts make the whole"
    # Values of another width than keys, as in multi-head latent attention.
    shapes = [(1, heads, whole_size, 4), (1, kv_heads, whole_size, 4), (1, kv_heads, whole_size, 6)]
    whole = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    parts = [tensor.detach()[:, :, own].clone().requires_grad_() for tensor in whole]
    weights = torch.randn(1, whole_size, heads, 6, generator=generator, dtype=dtype)
    settings: dict[str, Any] = {"attention_mask": None, "packed_runs": tokens.runs, "sliding_window": window}
    expected, _ = packed_attention(torch.nn.Identity(), *whole, **settings)
    found, _ = packed_attention(torch.nn.Identity(), *parts, sequence_group=dist.group.WORLD, **settings)
    (expected * weights).sum().backward()
    (found * weights[:, own]).sum().backward()
    pairs = [(found, expected[:, own])]
    pairs += [
        (cast("Any", part.grad), cast("Any", tensor.grad)[:, :, own]) for part, tensor in zip(parts, whole, strict=True)
    ]
    return max(float((one - other).abs().max()) for one, other in pairs)


HEADS: Final = {"4 heads": (4, 4), "8 to 4": (8, 4), "4 to 2": (4, 2), "4 to 1": (4, 1), "12 to 6": (12, 6)}


@pytest.mark.dist
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
def test_attention_over_four_ranks_is_attention_over_all_tokens(
    four_ranks: RankPool, heads: int, kv_heads: int, window: int | None
) -> None:
    assert max(four_ranks.run(attention_error, heads, kv_heads, window, torch.float64)) < 1e-12


@pytest.mark.dist
def test_attention_trades_bfloat16(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(attention_error, 4, 2, None, torch.bfloat16)) < 0.1


def driver_on_rank(rank: int, folder: Path, settings: dict[str, Any]) -> Driver:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **settings}
    return Driver(section, folder, rank, dist.get_world_size())


def gradients_on_rank(
    rank: int, folder: Path, sequences: list[Sequence], splits: list[Split], settings: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """Return the whole gradient for each split, as the optimizer finds it."""
    driver = driver_on_rank(rank, folder, settings)
    engine = cast("ShardedEngine", driver.engine)
    found: list[dict[str, torch.Tensor]] = []

    def look_instead_of_stepping() -> None:
        found.append({name: cast("Any", entry.grad).full_tensor() for name, entry in engine.parameters.items()})

    engine.optimizer.step = look_instead_of_stepping  # type: ignore[method-assign, assignment]
    for split in splits:
        driver.step(driver.take(sequences, split), weighted_loss)
    return found


NUM_SEQUENCES: Final = 9
ONE_SHARE: Final[list[Split]] = [
    [[list(range(NUM_SEQUENCES))]],
    [[[0, 3, 5], [], [1, 2, 4, 6, 7, 8]]],  # one of them empty
]
TWO_SHARES: Final[list[Split]] = [
    [[[0, 1, 2, 3], [4]], [[5, 6], [7, 8]]],
    [[[0, 1, 2, 3, 4, 5, 6, 7, 8], []], [[], []]],  # one data-parallel rank has all the data
]


def expected_gradient(folder: Path, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    """As `reference_gradient`; torch's grouped matrix product, which experts use, does not know float64."""
    model = load_reference(folder)
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    model.double()
    accumulate(model, sequences)
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def check_gradients(pool: RankPool, folder: Path, splits: list[Split], settings: dict[str, Any]) -> None:
    sequences = make_sequences(NUM_SEQUENCES)
    assert min(map(len, sequences)) == 1
    expected = expected_gradient(folder, sequences)
    for gradients in pool.run(gradients_on_rank, folder, sequences, splits, settings):
        assert [relative_error(gradient, expected) <= TOLERANCE for gradient in gradients] == [True] * len(splits)


@pytest.mark.dist
@pytest.mark.parametrize("kind", list(MODELS))
def test_gradient_over_two_ranks_is_that_of_the_global_batch(
    two_ranks: RankPool, folders: dict[str, Path], kind: str
) -> None:
    check_gradients(two_ranks, folders[kind], ONE_SHARE, {"sequence_parallel_size": 2})


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"reshard_after_forward": False, "gradient_sync": "every_micro_batch"},
        {"logit_chunk": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_gradient_is_the_same_with_other_settings(
    two_ranks: RankPool, folders: dict[str, Path], settings: dict[str, Any]
) -> None:
    check_gradients(two_ranks, folders["qwen3"], ONE_SHARE, {"sequence_parallel_size": 2, **settings})


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"shard_ranks": 2}], ids=["sharded", "replicated"])
def test_gradient_with_two_shares_of_the_data(
    four_ranks: RankPool, folders: dict[str, Path], settings: dict[str, Any]
) -> None:
    check_gradients(four_ranks, folders["qwen3"], TWO_SHARES, {"sequence_parallel_size": 2, **settings})


@pytest.mark.dist
def test_gradient_with_fewer_key_value_heads_than_ranks(four_ranks: RankPool, folders: dict[str, Path]) -> None:
    check_gradients(four_ranks, folders["qwen3"], ONE_SHARE, {"sequence_parallel_size": 4})


@pytest.mark.dist
@pytest.mark.parametrize("in_loss", [(0, 1), (2, 3)], ids=["first rank", "last rank"])
def test_gradient_where_a_single_rank_has_all_loss_tokens(
    two_ranks: RankPool, folders: dict[str, Path], in_loss: tuple[int, int]
) -> None:
    ids = np.arange(32).reshape(4, 8)  # four sequences of one length: the first two are the first rank's
    weight = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    sequences = [
        Sequence(ids[index], (np.arange(8) > 0) & (index in in_loss), {"weight": weight}) for index in range(4)
    ]
    expected = expected_gradient(folders["qwen3"], sequences)
    split: Split = [[[0, 1, 2, 3]]]
    settings = {"sequence_parallel_size": 2}
    for (gradient,) in two_ranks.run(gradients_on_rank, folders["qwen3"], sequences, [split], settings):
        assert relative_error(gradient, expected) <= TOLERANCE


@pytest.mark.dist
def test_gradient_in_bfloat16_is_as_near_as_that_of_one_rank(folders: dict[str, Path], two_ranks: RankPool) -> None:
    sequences = make_sequences(NUM_SEQUENCES)
    expected = expected_gradient(folders["qwen3"], sequences)
    halves: list[Split] = [[[[0, 1, 2, 3]], [[4, 5, 6, 7, 8]]]]
    errors = []
    for splits, size in ((ONE_SHARE[:1], 2), (halves, 1)):
        settings = {"param_dtype": "bfloat16", "sequence_parallel_size": size}
        found = two_ranks.run(gradients_on_rank, folders["qwen3"], sequences, splits, settings)[0][0]
        errors.append(relative_error(found, expected))
    split, whole = errors
    assert split < 2 * whole


def steps_and_log_probs(
    rank: int, folder: Path, settings: dict[str, Any]
) -> tuple[list[tuple[float, float, int, float]], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Make three steps that clip; return metrics, log-probs afterwards in eval mode, and the weights."""
    driver = driver_on_rank(rank, folder, {"max_grad_norm": 0.1, **settings})
    reports = [driver.train(make_sequences(NUM_SEQUENCES, seed)) for seed in range(3)]
    numbers = [(one.loss, one.metrics["log_prob"], one.num_tokens, one.optimizer.grad_norm) for one in reports]
    return numbers, driver.infer(make_sequences(6, seed=9)), driver.weights()


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"shard_ranks": 2}], ids=["sharded", "replicated"])
def test_steps_and_numbers_are_those_of_ranks_that_split_nothing(
    two_ranks: RankPool, four_ranks: RankPool, folders: dict[str, Path], settings: dict[str, Any]
) -> None:
    expected, expected_log_probs, expected_weights = two_ranks.run(steps_and_log_probs, folders["qwen3"], {})[0]
    split = {"sequence_parallel_size": 2, **settings}
    for numbers, log_probs, weights in four_ranks.run(steps_and_log_probs, folders["qwen3"], split):
        for step, expected_step in zip(numbers, expected, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-5)
        for one, other in zip(log_probs, expected_log_probs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2e-5)


def inferred(rank: int, folder: Path, sequences: list[Sequence]) -> list[torch.Tensor]:
    return driver_on_rank(rank, folder, {"sequence_parallel_size": 2}).infer(sequences)


@pytest.mark.dist
def test_log_probs_without_gradient_are_those_of_each_sequence_alone(
    two_ranks: RankPool, folders: dict[str, Path]
) -> None:
    sequences = make_sequences(NUM_SEQUENCES)
    model = load_reference(folders["qwen3"])
    for found in two_ranks.run(inferred, folders["qwen3"], sequences):
        for sequence, log_probs in zip(sequences, found, strict=True):
            torch.testing.assert_close(log_probs, masked_log_probs(model, sequence), rtol=0, atol=5e-6)


def test_a_size_that_does_not_divide_the_ranks_names_the_numbers_that_do() -> None:
    config = Fsdp2Config(learning_rate=1e-3, sequence_parallel_size=4)
    with pytest.raises(ConfigError, match=r"engine.sequence_parallel_size=4 does not divide the 6 ranks.*1, 2, 3, 6"):
        config.validate_world(6)
    assert config.data_parallel_ranks(8) == (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.dist
def test_a_size_that_does_not_divide_the_heads_names_the_numbers_that_do(
    folders: dict[str, Path], rank_pools: RankPools
) -> None:
    pool = rank_pools.get(3)
    with pytest.raises(
        RankError, match=r"ModelError: engine.sequence_parallel_size=3 does not divide the 4 attention heads.*1, 2, 4"
    ):
        pool.run(inferred_by_three, folders["qwen3"])


def inferred_by_three(rank: int, folder: Path) -> None:
    driver_on_rank(rank, folder, {"sequence_parallel_size": 3})


def test_padding_is_not_split() -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel_size=2 needs packing=true"):
        Fsdp2Config(learning_rate=1e-3, sequence_parallel_size=2, packing=False)
