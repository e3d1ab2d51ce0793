"""Weights out of several ranks: through flat buckets, in parts, into a folder. More of it is in the conformance kit."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from plugins.verl_fsdp.tests.refusals import message_of
from verl_engine.contract.errors import WeightsError
from verl_engine.contract.validation import validate
from verl_engine.engine.weights.bucket import plan_buckets, read_bucket, write_bucket
from verl_engine.engine.weights.shards import assemble_weights
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences
from verl_engine.testing.tiny_models import write_tiny_model
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.loading import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.engine.base import WeightShard, WeightSpec
    from verl_engine.testing.rank_pools import OnRanks

SECTION = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu"}


def through_buckets(rank: int, folder: Path, bucket_bytes: int, dtype: str | None) -> dict[str, torch.Tensor]:
    """Export through flat buckets; rank 0 lays them out and reads them back."""
    engine = Driver({"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu"}, folder, rank, 2).engine
    found = {}
    for bucket in plan_buckets(engine.weight_specs(), bucket_bytes, getattr(torch, dtype) if dtype else None):
        buffer = np.full(bucket.num_bytes, 255, np.uint8) if rank == 0 else None
        checksum = write_bucket(engine, bucket, buffer)
        if buffer is not None:
            found.update({name: tensor.clone() for name, tensor in read_bucket(buffer, bucket, checksum)})
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("bucket_bytes", "dtype"), [(1 << 20, None), (3000, None), (3000, "bfloat16")])
def test_buckets_carry_every_weight(
    model_folder: Path, bucket_bytes: int, dtype: str | None, on_ranks: OnRanks
) -> None:
    found = on_ranks(through_buckets, model_folder, bucket_bytes, dtype)[0]
    expected = dict(load_reference(model_folder).named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)) if dtype else tensor)


def most_alive(rank: int, folder: Path, out: Path, settings: dict[str, Any]) -> list[int]:
    """How many weights of the model are whole in memory at the same time, for each way out."""
    engine = Driver({**SECTION, **settings}, folder, rank, 2).engine
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    gather = DTensor.full_tensor

    def count_and_gather(self: DTensor, **kwargs: Any) -> torch.Tensor:
        nonlocal most
        whole = gather(self, **kwargs)
        if ".lora_" not in names.get(self.to_local().data_ptr(), ""):
            alive.append(weakref.ref(whole))
            most = max(most, sum(reference() is not None for reference in alive))
        return whole

    live: Any = engine
    names = {entry.to_local().data_ptr(): name for name, entry in live.parameters.items()}
    found = []
    DTensor.full_tensor = count_and_gather  # type: ignore[method-assign] # on this rank, which ends with the test
    [bucket] = plan_buckets(engine.weight_specs(), 1 << 30)
    write_bucket(engine, bucket, np.zeros(bucket.num_bytes, np.uint8) if rank == 0 else None)
    found.append(most)
    most = 0
    engine.save_pretrained(out / "saved")
    found.append(most)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}], ids=["plain", "lora"])
def test_one_full_weight_is_in_memory_at_a_time(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any], on_ranks: OnRanks
) -> None:
    assert on_ranks(most_alive, model_folder, tmp_path, settings) == [[1, 1], [1, 1]]


def bytes_of_ranks(rank: int, folder: Path) -> tuple[int, int, bool]:
    """What this rank holds of the model before it is sharded, and after; whether the tie is kept."""
    config = validate(Fsdp2Config, SECTION, at="engine")
    before = load_model(config, folder)
    engine: Any = Driver(SECTION, folder, rank, 2).engine
    shards = {tensor.untyped_storage().data_ptr(): tensor for _, tensor in engine.local_weights() if tensor.numel()}
    is_tied = engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    return (
        sum(entry.nbytes for entry in before.parameters() if not entry.is_meta),
        sum(tensor.untyped_storage().nbytes() for tensor in shards.values()),
        is_tied,
    )


@pytest.mark.dist
def test_host_memory_does_not_grow_with_the_ranks_where_embeddings_are_tied(tmp_path: Path, on_ranks: OnRanks) -> None:
    """Only the first rank reads the model, and all ranks together then hold it once."""
    folder = write_tiny_model(tmp_path / "tied", tied=True)
    model = load_reference(folder)
    whole = sum(entry.nbytes for entry in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    (first, first_shards, first_tied), (second, second_shards, second_tied) = on_ranks(bytes_of_ranks, folder)
    assert (first, second) == (whole, 0)
    assert first_tied
    assert second_tied
    assert whole <= first_shards + second_shards <= whole + 2 * buffers


def empty_import(rank: int, folder: Path) -> list[str]:
    """What an engine says that gets nothing, or a bucket of which no byte arrived."""
    engine = Driver(SECTION, folder, rank, 2).engine
    [bucket] = plan_buckets(engine.weight_specs(), 1 << 30)
    checksum = write_bucket(engine, bucket, np.zeros(bucket.num_bytes, np.uint8))
    untouched = np.zeros(bucket.num_bytes, np.uint8)
    return [
        message_of(lambda: engine.load_full_weights([])),
        message_of(lambda: engine.load_weight_shards([])),
        message_of(lambda: engine.load_full_weights(read_bucket(untouched, bucket, checksum))),
    ]


@pytest.mark.dist
def test_weight_sync_does_not_report_success_where_nothing_was_transferred(
    model_folder: Path, on_ranks: OnRanks
) -> None:
    for whole, parts, bucket in on_ranks(empty_import, model_folder):
        assert whole == parts
        assert whole.startswith("25 weights are missing: lm_head.weight")
        assert "arrived with checksum" in bucket


def save_into_a_file(rank: int, folder: Path, out: Path) -> str:
    engine = Driver(SECTION, folder, rank, 2).engine
    if rank == 0:
        out.write_text("not a folder", encoding="utf-8")
    try:
        engine.save_pretrained(out / "model")
    except (OSError, WeightsError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.dist
def test_no_rank_is_left_waiting_for_one_that_cannot_write(
    model_folder: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    first, second = on_ranks(save_into_a_file, model_folder, tmp_path / "file")
    assert first.startswith(("NotADirectoryError", "FileExistsError"))
    assert second == f"WeightsError: the first rank could not write {tmp_path / 'file' / 'model'}: {first}"


def in_parts(
    rank: int, folder: Path, size: int, settings: dict[str, Any]
) -> tuple[list[WeightSpec], list[WeightShard], dict[str, torch.Tensor]]:
    """Train a step, export whole and in parts."""
    driver = Driver({**SECTION, **settings}, folder, rank, size)
    driver.train(make_sequences(8))
    shards = [dataclasses.replace(part, tensor=part.tensor.clone()) for part in driver.engine.weight_shards()]
    return driver.engine.weight_specs(), shards, driver.weights()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (3, {}),
        (4, {"shard_ranks": 2}),
        (2, {"lora": {"rank": 2}}),
        (4, {"shard_ranks": 2, "lora": {"rank": 2}}),
    ],
    ids=["uneven", "copies", "lora", "copies and lora"],
)
def test_parts_of_all_ranks_make_the_exported_weights(
    model_folder: Path, size: int, settings: dict[str, Any], on_ranks: OnRanks
) -> None:
    """Three ranks split 32 rows unevenly; with adapters the parts are merged, under a plain model's names."""
    ranks = on_ranks(in_parts, model_folder, size, settings, world_size=size)
    found = dict(assemble_weights(ranks[0][0], [shard for rank in ranks for shard in rank[1]]))
    assert list(found) == list(ranks[0][2])
    for name, tensor in ranks[0][2].items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-7 if settings.get("lora") else 0)
    copies = settings.get("shard_ranks", 1) > 1
    for rank, (_, shards, _) in enumerate(ranks):
        # Four ranks in two groups of two: ranks 0 and 2 hold the same parts, and so do 1 and 3.
        expected = ((rank % 2, rank % 2 + 2), rank > 1) if copies else ((), False)
        assert {(shard.replicas, shard.is_replica) for shard in shards if shard.tensor.numel()} == {expected}
