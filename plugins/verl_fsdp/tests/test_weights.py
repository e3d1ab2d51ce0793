"""Weights out of the engine: whole, right, and readable by transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from plugins.verl_fsdp.tests.driving import Driver, take
from plugins.verl_fsdp.tests.reference import load_reference, make_sequences
from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.weight_bucket import plan_buckets, read_bucket, write_bucket
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def export_and_save(rank: int, folder: Path, saved: Path) -> dict[str, torch.Tensor]:
    """Train a step, look at log-probs without gradient, save, and export."""
    driver = Driver.create(folder)
    sequences = make_sequences(4)
    driver.step(take(sequences, [[rank, rank + 2]]))
    with torch.no_grad():
        # Without a backward after it, gathered parameters must not stay where the export would take them for shards.
        driver.engine.forward(PackedBatch.from_sequences(sequences), 1.0)
    driver.engine.save_pretrained(saved)
    return driver.weights()


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_folder_holds_the_exported_weights(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    first, second = run_ranks(export_and_save, folder, tmp_path / "saved")
    saved = dict(load_reference(tmp_path / "saved").named_parameters())
    original = dict(load_reference(folder).named_parameters())
    assert first.keys() == saved.keys() == original.keys()
    assert ("lm_head.weight" in first) is not tied
    for name, tensor in saved.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor)
        assert not torch.equal(original[name], tensor)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert [path.name for path in tmp_path.glob(".*")] == []


def through_buckets(rank: int, folder: Path, bucket_bytes: int, dtype: str | None) -> dict[str, torch.Tensor]:
    """Export through flat buckets; rank 0 lays them out and reads them back."""
    engine = Driver.create(folder).engine
    found = {}
    for bucket in plan_buckets(engine.weight_specs(), bucket_bytes, getattr(torch, dtype) if dtype else None):
        buffer = np.full(bucket.num_bytes, 255, np.uint8) if rank == 0 else None
        checksum = write_bucket(engine, bucket, buffer)
        if buffer is not None:
            found.update({name: tensor.clone() for name, tensor in read_bucket(buffer, bucket, checksum)})
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("bucket_bytes", "dtype"), [(1 << 20, None), (3000, None), (3000, "bfloat16")])
def test_buckets_carry_every_weight(model_folder: Path, bucket_bytes: int, dtype: str | None) -> None:
    found = run_ranks(through_buckets, model_folder, bucket_bytes, dtype)[0]
    expected = dict(load_reference(model_folder).named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)) if dtype else tensor)
