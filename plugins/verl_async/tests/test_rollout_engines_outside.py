"""Rollout engines of others: one over transformers' generate, and one whose model lives in two processes."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core.tests.fake_distributions import write_distribution
from plugins.verl_async.tests.embedded_models import PROMPTS, full_log_probs, qwen3, request
from plugins.verl_async.tests.two_process_engine import TwoProcessEngine
from verl_async.orchestrator.shared_slots import SharedMemoryTransport, SharedSlots
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import Acknowledgement
from verl_async.rollout.kind import ROLLOUT
from verl_async.rollout.kit.kit import CHECKS, RolloutKit
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import BucketEntry, WeightBucket, combine_checksums

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("generate_engine.py")


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutKit]:
    """The kit on an engine in a package of its own."""
    text = SOURCE.read_text(encoding="utf-8")
    points = {ROLLOUT.group: {"plain_generate": "toy_generate"}}
    keywords = [f"{ROLLOUT.api_keyword}{ROLLOUT.api_version}"]
    write_distribution(tmp_path, "toy", points, keywords=keywords, modules={"toy_generate": text})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = RolloutKit("plain_generate")
    yield found
    found.close()
    sys.modules.pop("toy_generate", None)


def test_an_engine_over_generate_passes_with_its_gaps(kit: RolloutKit) -> None:
    outcomes = [kit.run(check) for check in CHECKS]
    assert [(one.check.name, one.reason, one.details) for one in outcomes if one.status == "failed"] == []
    skipped = [one.check.name for one in outcomes if one.status == "skipped"]
    assert skipped == [check.name for check in CHECKS if check.features]
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) <= 145


def test_weights_go_to_both_processes_of_an_engine_as_handles_of_shared_memory(tmp_path: Path) -> None:
    qwen3(0).save_pretrained(tmp_path / "model")
    engine = TwoProcessEngine(EmbeddedConfig(device="cpu"), tmp_path / "model")
    try:
        weights = dict(qwen3(1).named_parameters())
        plan = [
            WeightBucket((BucketEntry(name, tuple(one.shape), "float32", 0),), one.numel() * 4)
            for name, one in weights.items()
        ]
        slots = SharedSlots.create(max(bucket.num_bytes for bucket in plan), tmp_path)
        engine.pause("wait")
        engine.begin_weights(1, plan, SharedMemoryTransport(tuple(slots.paths)))
        slots.unlink()
        checksums = []
        for place, weight in enumerate(weights.values()):
            content = np.frombuffer(weight.detach().numpy().tobytes(), np.uint8)
            slots[place % 2][: content.size] = content
            checksums.append(zlib.crc32(content.data))
            if place == len(weights) - 1:
                with pytest.raises(WeightsError, match="1 weights of version 1 were not loaded"):
                    engine.commit_weights(1)
            engine.load_bucket(place % 2, checksums[-1])
        sent = Acknowledgement(1, combine_checksums(checksums))
        assert engine.commit_weights(1) == {"first": sent, "second": sent}
        engine.resume()
        asked = [request(prompt) for prompt in PROMPTS]
        for one, found in zip(asked, generate(engine, asked), strict=True):
            assert found.weight_versions == [1] * 12
            assert found.log_probs == pytest.approx(full_log_probs(qwen3(1), one.prompt_ids, found.token_ids), abs=1e-5)
    finally:
        engine.close()
    assert not any(process.is_alive() for process in engine.processes)
