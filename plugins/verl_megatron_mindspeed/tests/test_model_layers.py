"""Layers in plain PyTorch: attention, norms, dropout, and activations that are computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from plugins.verl_megatron_mindspeed.tests.model_families import build, places, run, tokens, write_family

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool


HEADS, GROUPS, WIDTH = 4, 2, 8


@pytest.fixture(scope="session")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose folder asks for dropout."""
    return write_family(tmp_path_factory.mktemp("dropping") / "model", "qwen3", attention_dropout=0.3)


def gradient(folder: Path, seed: int = 3, *, train: bool = True, **fields: Any) -> torch.Tensor:
    """Return the whole gradient of some sum of logits, after seeding as a worker does."""
    model = build(folder, **{"dropout": "model", **fields})
    torch.manual_seed(seed)
    model.chunks[0].train(train)
    model.reseed_dropout()
    logits = run(model, tokens())
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    gradients = [parameter.grad for parameter in model.chunks[0].parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def test_dropout_follows_from_the_process_s_random_numbers(ranks: RankPool, dropping: Path) -> None:
    """Those are seeded by ``engine.seed``, and checkpoints keep them."""
    assert ranks.run(_same_and_other, dropping) == [(True, False)] * 2


def _same_and_other(_rank: int, folder: Path) -> tuple[bool, bool]:
    first = gradient(folder)
    return torch.equal(first, gradient(folder)), torch.equal(first, gradient(folder, seed=4))


@pytest.mark.fault(5)
def test_there_is_no_dropout_in_eval_mode_or_by_default(ranks: RankPool, dropping: Path, tmp_path: Path) -> None:
    assert ranks.run(_equal_without, dropping, write_family(tmp_path, "qwen3")) == [[True, True, False]] * 2


def _equal_without(_rank: int, dropping: Path, plain: Path) -> list[bool]:
    found = gradient(dropping, train=False), gradient(dropping, dropout="off"), gradient(dropping)
    return [torch.equal(each, gradient(plain)) for each in found]


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        {"recompute": "full", "recompute_num_layers": 2},
        {"recompute": "full", "recompute_method": "block"},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")},
    ],
    ids=["each layer", "two layers", "the first layer", "attention", "attention and mlp"],
)
def test_recomputed_activations_give_the_same_gradient(ranks: RankPool, dropping: Path, fields: dict[str, Any]) -> None:
    """Bit for bit, dropout included."""
    assert ranks.run(_equal_with, dropping, fields) == [True, True]


def _equal_with(_rank: int, folder: Path, fields: dict[str, Any]) -> bool:
    return torch.equal(gradient(folder, **fields), gradient(folder))


def test_building_leaves_the_process_s_random_numbers_alone(ranks: RankPool, dropping: Path) -> None:
    """Megatron seeds them, so that a second engine would change what a first one draws."""
    assert ranks.run(_untouched, dropping) == [True, True]


def _untouched(_rank: int, folder: Path) -> bool:
    before = torch.get_rng_state()
    build(folder)
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "fields", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {}], ids=["heads", "tokens", "data"]
)
def test_ranks_draw_other_dropout(ranks: RankPool, dropping: Path, fields: dict[str, Any]) -> None:
    first, second = ranks.run(_drawn, dropping, fields)
    assert first != second


def _drawn(_rank: int, folder: Path, fields: dict[str, Any]) -> list[float]:
    from megatron.core import tensor_parallel

    build(folder, **fields)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return torch.rand(4).tolist()


def test_ranks_take_mirrored_pieces(ranks: RankPool) -> None:
    assert ranks.run(_pieces) == [[[0, 1, 6, 7], [2, 3, 4, 5]]] * 2


def _pieces(_rank: int) -> list[list[int]]:
    from verl_megatron_mindspeed.model.zigzag import positions

    return [positions(8, 2, part).tolist() for part in range(2)]


def test_a_split_sequence_attends_as_a_whole_one(ranks: RankPool) -> None:
    """Outputs and gradients; some sequences have one length, one has none."""
    for distances in ranks.run(_split_against_whole, (8, 8, 0, 4, 12)):
        assert max(distances) < 1e-5


def _split_against_whole(rank: int, lengths: tuple[int, ...]) -> list[float]:
    from verl_megatron_mindspeed.model.local_attention import PackedAttention
    from verl_megatron_mindspeed.model.zigzag import positions

    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH))
    whole = [torch.randn(sum(lengths), *shape, generator=generator, requires_grad=True) for shape in shapes]
    outputs, start, own = [], 0, []
    for length in lengths:
        query, key, value = (tensor[start : start + length].transpose(0, 1) for tensor in whole)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        outputs.append(attended.transpose(0, 1).flatten(1))
        if length:
            own.append(start + positions(length, 2, rank))
        start += length
    mine = torch.cat(own)
    expected = torch.cat(outputs)
    expected.square().sum().backward()

    config = SimpleNamespace(attention_dropout=0.0, sequence_parallel=False)
    attention = PackedAttention(config=config, pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    parts = [tensor.detach()[mine].requires_grad_() for tensor in whole]
    found = attention(*parts, None, packed_seq_params=places(lengths))
    found.square().sum().backward()
    gradients = [(part.grad, tensor.grad) for part, tensor in zip(parts, whole, strict=True)]
    pairs = [(own, whole[mine]) for own, whole in gradients if own is not None and whole is not None]
    return [(first - second).abs().max().item() for first, second in [(found, expected[mine]), *pairs]]


def test_norms_say_that_each_rank_has_a_part_of_the_tokens(ranks: RankPool) -> None:
    """By this mark Megatron knows to sum their gradients over the tensor-parallel ranks."""
    assert ranks.run(_marks) == [[False, True]] * 2


def _marks(_rank: int) -> list[bool]:
    from verl_megatron_mindspeed.model.layers import RMSNorm

    configs = [SimpleNamespace(params_dtype=torch.float32, sequence_parallel=mark) for mark in (False, True)]
    weights: list[Any] = [RMSNorm(config, 4, 1e-6).weight for config in configs]
    return [bool(weight.sequence_parallel) for weight in weights]
