"""Rank 0's model on every rank: weights, buffers and ties arrive, and no other rank ever holds a whole model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.tiny_models import tiny_config, write_absolute_position_model, write_tiny_model
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.loading import load_model
from verl_fsdp.model.materialize import Materializer

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

KINDS = ("qwen3", "qwen3_tied", "gpt2_tied", "qwen3_moe", "gemma3_sliding", "buffered")
SECTION: dict[str, Any] = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu"}


def write_model(folder: Path, kind: str) -> Path:
    if kind.startswith("qwen3") and kind != "qwen3_moe":
        return write_tiny_model(folder, tied=kind == "qwen3_tied")
    if kind == "gpt2_tied":
        return write_absolute_position_model(folder)
    if kind == "buffered":
        from verl_engine.testing.buffered_model import write_buffered_model

        return write_buffered_model(folder)
    config: Any
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **tiny_config(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    else:
        config = transformers.Gemma3TextConfig(
            **tiny_config(), sliding_window=4, layer_types=["sliding_attention", "full_attention"]
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, tied ones under each of their names."""
    return dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )


def ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name in sorted(tensors):
        groups.setdefault(id(tensors[name]), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def materialized(rank: int, folder: Path, nowhere: Path) -> tuple[dict[str, torch.Tensor], list[list[str]], Any]:
    """Build an engine; only rank 0 is told where the model is."""
    import verl_engine.testing.buffered_model  # noqa: F401 - registers the model's type

    driver = Driver(SECTION, folder if rank == 0 else nowhere, rank, 2)
    live = tensors_of(cast("Any", driver.engine).model)
    whole = {name: (entry.full_tensor() if isinstance(entry, DTensor) else entry) for name, entry in live.items()}
    return {name: entry.detach().clone() for name, entry in whole.items()}, ties(live), driver.infer(make_sequences(3))


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_rank_0s_weights_buffers_and_ties(tmp_path: Path, ranks: RankPool, kind: str) -> None:
    folder = write_model(tmp_path / kind, kind)
    reference = load_reference(folder)
    expected = tensors_of(reference)
    assert any(name.endswith("inv_freq") for name in expected) or kind == "gpt2_tied"  # not persistent: in no file
    log_probs = [masked_log_probs(reference, sequence) for sequence in make_sequences(3)]
    for found, tied, inferred in ranks.run(materialized, folder, tmp_path / "nowhere"):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].dtype == tensor.dtype
        assert tied == ties(expected)
        for part, wanted in zip(inferred, log_probs, strict=True):
            torch.testing.assert_close(part, wanted, rtol=0, atol=5e-6)


def held_while_sharding(rank: int, folder: Path) -> list[int]:
    """Return how many bytes of full weights a rank holds whenever a module is about to be sharded, and at the end."""
    held: list[int] = []

    def whole_bytes(model: torch.nn.Module) -> int:
        return sum(
            parameter.nbytes
            for parameter in model.parameters()
            if not isinstance(parameter, DTensor) and not parameter.is_meta
        )

    def watched(module: torch.nn.Module, **settings: Any) -> Any:
        held.append(whole_bytes(models[0]))
        return fully_shard(module, **settings)

    models: list[torch.nn.Module] = []

    def loaded(*arguments: Any) -> Any:
        models.append(load_model(*arguments))
        held.append(whole_bytes(models[0]))
        return models[0]

    with (
        mock.patch("verl_fsdp.fsdp2.parallelize.fully_shard", watched),
        mock.patch("verl_fsdp.fsdp2.build.load_model", loaded),
    ):
        Driver(SECTION, folder, rank, 2)
    return [*held, whole_bytes(models[0])]


@pytest.mark.dist
def test_tied_embeddings_make_no_rank_but_the_first_hold_more_than_a_block(tmp_path: Path, ranks: RankPool) -> None:
    folder = write_tiny_model(tmp_path / "tied", tied=True)
    model = load_reference(folder)
    total = sum(parameter.nbytes for parameter in model.parameters())
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    rest = total - 2 * block  # embedding, which is the output layer too, and norms
    first, second = ranks.run(held_while_sharding, folder)
    assert second == [0, block, block, rest, 0]
    assert first == [total, total, total - block, rest, 0]  # each block is let go of once it is sharded


class Shared(torch.nn.Module):
    """A block that shares a buffer with others, and one parameter with itself."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.copy = table  # neither parameter nor buffer: nn.Module keeps it all the same
        self.steps = torch.nn.Buffer(torch.tensor(3, dtype=torch.int32))
        self.flags = torch.nn.Buffer(torch.tensor([True, False, True]))
        self.nothing = torch.nn.Buffer(torch.zeros(0))


def blocks_of_one_table(rank: int, tied_as_rank_0: bool) -> None:
    with torch.device("cpu" if rank == 0 else "meta"):
        table = torch.arange(3.0, dtype=torch.float64)
        model = torch.nn.Sequential(Shared(table), Shared(table))
    first, second = cast("Any", model[0]), cast("Any", model[1])
    if rank == 1:
        first.first.bias = torch.nn.Parameter(first.first.bias.to(torch.bfloat16))  # rank 0's dtype counts
        if not tied_as_rank_0:
            for block in (first, second):
                block.second.weight = torch.nn.Parameter(torch.empty_like(block.first.weight))
                block.table = block.table.clone()
    first.first.weight.requires_grad_(rank == 0)
    materialize = Materializer(model, torch.device("cpu"))
    materialize(first)
    assert second.first.bias.is_meta is (rank == 1)
    materialize(second)
    materialize(model)
    assert first.table is second.table
    assert first.table is first.copy
    assert first.first.weight is first.second.weight
    assert first.first.weight.requires_grad
    assert first.first.weight is not second.first.weight
    assert first.first.bias.dtype == torch.float32
    assert first.table.tolist() == [0.0, 1.0, 2.0]
    assert first.table.dtype == torch.float64
    assert (int(second.steps), second.flags.tolist()) == (3, [True, False, True])


@pytest.mark.dist
@pytest.mark.parametrize("tied_as_rank_0", [True, False], ids=["tied_alike", "tied_otherwise"])
def test_what_blocks_share_stays_one_tensor(ranks: RankPool, tied_as_rank_0: bool) -> None:
    ranks.run(blocks_of_one_table, tied_as_rank_0)


def different_models(rank: int) -> str:
    model = torch.nn.Linear(2, 2 if rank == 0 else 3)
    with pytest.raises(ModelError) as caught:
        Materializer(model, torch.device("cpu"))
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_with_another_model_is_refused_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(different_models)
    assert first == second
    assert "rank 1 built another model than rank 0 read from the folder: bias is of shape (3,) instead of" in first


def refusal(rank: int, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(Fsdp2Config(learning_rate=1e-3), folder)
    assert rank == 0 or caught.value.__cause__ is None
    return str(caught.value)


def break_folder(folder: Path, how: str) -> None:
    config = folder / "config.json"
    if how == "missing":
        shutil.rmtree(folder)
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "garbage weights":
        (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    elif how == "other shapes":
        config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 48}))
    else:
        assert how == "other names"
        write_absolute_position_model(folder.parent / "gpt2")
        shutil.copy(folder.parent / "gpt2" / "model.safetensors", folder / "model.safetensors")


@pytest.mark.dist
@pytest.mark.parametrize("how", ["missing", "no weights", "garbage weights", "other shapes", "other names"])
def test_a_folder_that_rank_0_cannot_load_is_refused_on_every_rank(tmp_path: Path, ranks: RankPool, how: str) -> None:
    folder = write_tiny_model(tmp_path / "broken")
    break_folder(folder, how)
    first, second = ranks.run(refusal, folder, timeout_s=60.0)
    assert first == second
    assert str(folder) in first


def with_missing_weights(rank: int, folder: Path, seed: int) -> dict[str, torch.Tensor]:
    return Driver({**SECTION, "seed": seed}, folder, rank, 2).weights()


@pytest.mark.dist
def test_weights_that_the_folder_lacks_are_drawn_by_the_seed_alike_on_all_ranks(
    tmp_path: Path, ranks: RankPool
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path / "headless")
    kept = load_file(folder / "model.safetensors")
    lacking = "model.layers.0.mlp.up_proj.weight"
    original = kept.pop(lacking)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    first, second = ranks.run(with_missing_weights, folder, 0)
    again, _ = ranks.run(with_missing_weights, folder, 0)
    other, _ = ranks.run(with_missing_weights, folder, 1)
    assert torch.equal(first[lacking], second[lacking])
    assert torch.equal(first[lacking], again[lacking])
    assert not torch.equal(first[lacking], other[lacking])
    assert not torch.equal(first[lacking], original)
    for name, tensor in kept.items():
        assert torch.equal(first[name], tensor)


def random_numbers_after_loading(rank: int, folder: Path) -> bool:
    before = torch.get_rng_state()
    load_model(Fsdp2Config(learning_rate=1e-3, seed=3), folder)
    del rank
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.dist
def test_loading_leaves_the_random_numbers_of_the_process_alone(model_folder: Path, ranks: RankPool) -> None:
    assert ranks.run(random_numbers_after_loading, model_folder) == [True, True]


def stored_dtypes(rank: int, folder: Path, settings: dict[str, Any]) -> set[tuple[str, torch.dtype]]:
    driver = Driver({**SECTION, **settings}, folder, rank, 2)
    model = cast("Any", driver.engine).model
    driver.infer(make_sequences(2))
    return {
        *(("parameter", parameter.dtype) for parameter in model.parameters()),
        *(("buffer", buffer.dtype) for buffer in model.buffers()),
    }


@pytest.mark.dist
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward_only", [True, False], ids=["forward_only", "trained"])
def test_weights_are_kept_in_the_configured_dtype_whatever_the_folder_says(
    tmp_path: Path, ranks: RankPool, forward_only: bool, param_dtype: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    settings = {"param_dtype": param_dtype, "forward_only": forward_only}
    kept = getattr(torch, param_dtype) if forward_only else torch.float32
    for found in ranks.run(stored_dtypes, folder, settings):
        assert found == {("parameter", kept), ("buffer", torch.float32)}  # rotary frequencies stay precise
