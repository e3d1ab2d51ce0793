"""Weights as flat byte buckets."""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.fake_engine import FakeEngine
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.engine.base import WeightSpec
from verl_engine.engine.weights.bucket import (
    BucketEntry,
    WeightBucket,
    combine_checksums,
    plan_buckets,
    read_bucket,
    write_bucket,
)
from verl_engine.engine.worker import EngineWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPECS = [
    WeightSpec("a", (3,), torch.float32),
    WeightSpec("b", (4, 4), torch.float32),
    WeightSpec("c", (), torch.bfloat16),
    WeightSpec("steps", (2,), torch.int64),
]


def test_a_plan_worked_by_hand() -> None:
    """a takes 12 bytes and b 64; together they would end at 128, so c starts the second bucket."""
    assert plan_buckets(SPECS, 128) == [
        WeightBucket((BucketEntry("a", (3,), "float32", 0), BucketEntry("b", (4, 4), "float32", 64)), 128),
        WeightBucket((BucketEntry("c", (), "bfloat16", 0), BucketEntry("steps", (2,), "int64", 64)), 128),
    ]


def test_floating_point_weights_are_cast_and_others_are_not() -> None:
    [bucket] = plan_buckets(SPECS, 10_000, torch.bfloat16)
    assert [entry.dtype for entry in bucket.entries] == ["bfloat16", "bfloat16", "bfloat16", "int64"]
    assert [entry.num_bytes for entry in bucket.entries] == [6, 32, 2, 16]


def test_a_weight_larger_than_a_bucket_gets_its_own() -> None:
    plan = plan_buckets([SPECS[0], WeightSpec("big", (100,), torch.float32), SPECS[2]], 64)
    assert [[entry.name for entry in bucket.entries] for bucket in plan] == [["a"], ["big"], ["c"]]
    assert [bucket.num_bytes for bucket in plan] == [64, 448, 64]


@pytest.mark.parametrize("dtype", ["int8", "bf16", "nn"])
def test_a_dtype_that_weights_cannot_be_cast_to_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype={dtype} is no dtype that weights can be cast to"):
        EngineWorker.plan_weight_buckets(mock.Mock(), 1, dtype)


def test_no_weights_no_buckets() -> None:
    assert plan_buckets([], 64) == []


def make_engine(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> FakeEngine:
    generator = torch.Generator().manual_seed(0)
    return FakeEngine(
        {
            f"weight {index}": (10 * torch.randn(shape, generator=generator)).to(dtype)
            for index, (shape, dtype) in enumerate(shapes)
        }
    )


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
        ),
        min_size=1,
        max_size=6,
    ),
    bucket_bytes=st.integers(1, 700),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_what_is_written_is_what_is_read(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int, dtype: torch.dtype | None
) -> None:
    engine = make_engine(shapes)
    found = {}
    for bucket in plan_buckets(engine.weight_specs(), bucket_bytes, dtype):
        assert len(bucket.entries) == 1 or bucket.num_bytes < bucket_bytes + 64
        assert all(entry.offset % 64 == 0 for entry in bucket.entries)
        buffer = np.full(bucket.num_bytes + 7, 0xAB, np.uint8)  # larger than needed, with rests of an earlier bucket
        checksum = write_bucket(engine, bucket, buffer)
        assert checksum == zlib.crc32(buffer[: bucket.num_bytes].tobytes())
        for name, tensor in read_bucket(buffer, bucket, checksum):
            assert name not in found
            found[name] = tensor.clone()
    assert list(found) == list(engine.weights)
    for name, weight in engine.weights.items():
        kept = dtype if dtype is not None and weight.dtype.is_floating_point else weight.dtype
        assert found[name].dtype == kept
        assert torch.equal(found[name], weight.to(kept))


def test_the_checksum_does_not_depend_on_what_the_buffer_held_before() -> None:
    engine = make_engine([((3,), torch.float32), ((5,), torch.bfloat16)])
    [bucket] = plan_buckets(engine.weight_specs(), 10_000)
    checksums = {write_bucket(engine, bucket, np.full(bucket.num_bytes, rest, np.uint8)) for rest in (0, 1, 255)}
    assert len(checksums) == 1


def test_a_rank_without_a_buffer_takes_part_in_every_gathering() -> None:
    engine = make_engine([((3,), torch.float32), ((5,), torch.float32)])
    [bucket] = plan_buckets(engine.weight_specs(), 10_000)
    assert write_bucket(engine, bucket, None) == 0
    assert engine.calls == ["gather weight 0", "gather weight 1"]


class FreshEngine(FakeEngine):
    """Makes each weight when it is asked for, as gathering does, and sees whether an earlier one is still alive."""

    alive = 0
    most_alive = 0

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._gather(name)

    def _gather(self, name: str) -> torch.Tensor:
        tensor = self.weights[name].clone()
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(tensor, self._let_go)
        return tensor

    def _let_go(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("has_buffer", [True, False], ids=["writer", "others"])
def test_one_gathered_weight_is_alive_at_a_time(has_buffer: bool) -> None:
    engine = FreshEngine({f"weight {index}": torch.zeros(3) for index in range(4)})
    [bucket] = plan_buckets(engine.weight_specs(), 10_000)
    write_bucket(engine, bucket, np.zeros(bucket.num_bytes, np.uint8) if has_buffer else None)
    assert (engine.alive, engine.most_alive) == (0, 1)


class OtherEngine(FakeEngine):
    """Gives something else than it declared."""

    given: ClassVar[list[tuple[str, torch.Tensor]]] = []

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        del names
        return iter(self.given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"gave nothing where its plan has weight 0 of shape \(3,\)"),
        ([("other", torch.zeros(3))], r"gave other of shape \(3,\) where its plan has weight 0"),
        ([("weight 0", torch.zeros(1))], r"gave weight 0 of shape \(1,\) where its plan has weight 0 of shape \(3,\)"),
    ],
    ids=["nothing", "another", "a part"],
)
def test_success_is_not_reported_where_the_engine_gave_nothing(
    monkeypatch: pytest.MonkeyPatch, given: list[tuple[str, torch.Tensor]], message: str
) -> None:
    engine = OtherEngine({"weight 0": torch.zeros(3)})
    monkeypatch.setattr(OtherEngine, "given", given)
    [bucket] = plan_buckets(engine.weight_specs(), 10_000)
    with pytest.raises(WeightsError, match=message):
        write_bucket(engine, bucket, np.zeros(bucket.num_bytes, np.uint8))


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    engine = make_engine([((3,), torch.float32), ((5,), torch.float32)])
    [bucket] = plan_buckets(engine.weight_specs(), 10_000)
    buffer = np.zeros(bucket.num_bytes, np.uint8)
    checksum = write_bucket(engine, bucket, buffer)
    for place in (0, 40, bucket.num_bytes - 1):  # in a weight, in padding, at the end
        buffer[place] ^= 1
        with pytest.raises(
            WeightsError, match=r"weight bucket weight 0 … weight 1 arrived with checksum 0x[0-9a-f]{8}"
        ):
            list(read_bucket(buffer, bucket, checksum))
        buffer[place] ^= 1
    assert len(list(read_bucket(buffer, bucket, checksum))) == 2


def test_too_few_bytes_are_noticed() -> None:
    bucket = WeightBucket((BucketEntry("a", (3,), "float32", 0),), 64)
    with pytest.raises(WeightsError, match="a weight bucket of 64 bytes arrived with only 63"):
        list(read_bucket(np.zeros(63, np.uint8), bucket, 0))


def test_combined_checksums_depend_on_order_number_and_content() -> None:
    assert combine_checksums([]) == 0
    assert combine_checksums([0x01020304]) == zlib.crc32(b"\x04\x03\x02\x01")
    several = [combine_checksums(parts) for parts in ([1, 2], [2, 1], [1], [1, 2, 0], [1, 3])]
    assert len(set(several)) == 5
