"""Weights out of two ranks through flat buckets; their export itself is in the conformance kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from verl_engine.engine.weight_bucket import plan_buckets, read_bucket, write_bucket
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference
from verl_engine.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


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
def test_buckets_carry_every_weight(model_folder: Path, bucket_bytes: int, dtype: str | None) -> None:
    found = run_ranks(through_buckets, model_folder, bucket_bytes, dtype)[0]
    expected = dict(load_reference(model_folder).named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)) if dtype else tensor)
