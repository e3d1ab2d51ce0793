"""A worker's calls for snapshots of weights and for outputs: what launchers use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core.tests.fake_distributions import write_distribution
from core.tests.snapshot_engine import change
from verl_engine import BatchError, ConfigError, EngineConfig, EngineWorker, Sequence, UnsupportedError, WeightsError
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.engine.snapshots.shared import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.engine.token_output import OutputName

HOOKS = """
from core.tests.snapshot_engine import SPEC, engine_create
"""
SEQUENCE = Sequence(np.array([1, 2, 3]), np.array([False, True, True]))


@pytest.fixture
def worker(site: Path) -> Iterator[EngineWorker]:
    """With room for two snapshots of two pages each, and no third."""
    points = {BACKENDS_GROUP: {"keeping": "keeping_hooks"}}
    write_distribution(site, "keeping", points, modules={"keeping_hooks": HOOKS})
    config = EngineConfig(backend="keeping", snapshot_memory="shared", snapshot_limit_bytes=20_000)
    worker = EngineWorker(config, site)
    worker.create()
    yield worker
    worker.close()


def log_probs(worker: EngineWorker, tag: int | None = None) -> list[float]:
    ((found,),) = worker.infer_batch([[SEQUENCE]], tag=tag)
    return [float(value) for value in found]


def test_log_probs_under_a_tag_are_those_of_the_older_policy_and_the_newer_one_stays(worker: EngineWorker) -> None:
    worker.save_model_to_cpu(1, version=4)
    # logits[t] = t, t + 8, … t + 32, which add up to 5 t + 80.
    assert log_probs(worker) == [0.0, 90.0, 95.0]
    change(worker.engine, 2.0)  # type: ignore[arg-type] # the small engine
    assert log_probs(worker) == [0.0, 10.0, 10.0]
    assert log_probs(worker, tag=1) == [0.0, 90.0, 95.0]
    assert log_probs(worker) == [0.0, 10.0, 10.0]
    with pytest.raises(WeightsError, match="no weights were saved under '2'"):
        log_probs(worker, tag=2)


def test_a_failure_under_a_tag_brings_the_newer_policy_back(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save_model_to_cpu(1)
    change(worker.engine, 2.0)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(type(worker.engine), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            log_probs(worker, tag=1)
    assert log_probs(worker) == [0.0, 10.0, 10.0]


def test_the_config_says_where_snapshots_lie_and_how_much_they_may_take(worker: EngineWorker) -> None:
    worker.save_model_to_cpu(1, version=4)
    assert SnapshotReader(worker.snapshot_handle(1)).newest().version == 4
    worker.save_model_to_cpu(2)
    with pytest.raises(WeightsError, match=r"engine\.snapshot_limit_bytes=20000"):
        worker.save_model_to_cpu(3)
    worker.clear_cpu_model(2)
    worker.save_model_to_cpu(3)
    worker.restore_model_from_cpu(1)


def test_closing_a_worker_removes_what_it_shared(worker: EngineWorker) -> None:
    worker.save_model_to_cpu(1)
    handle = worker.snapshot_handle(1)
    worker.close()
    with pytest.raises(WeightsError, match="is gone"):
        SnapshotReader(handle)


def test_outputs_are_asked_for_by_name(worker: EngineWorker) -> None:
    ((found,),) = worker.infer_outputs([[SEQUENCE]], ("log_probs",))
    assert found["log_probs"].tolist() == log_probs(worker)
    with pytest.raises(ConfigError, match=r"name='logprobs' must be one of log_probs, entropy, values, routed_experts"):
        worker.infer_outputs([[SEQUENCE]], ("logprobs",))  # type: ignore[arg-type] # as a caller may who does not check
    with pytest.raises(BatchError, match="top_k=-1 ids of each distribution; use 0 or more"):
        worker.infer_outputs([[SEQUENCE]], ("top_k_ids",), top_k=-1)
    unasked: tuple[OutputName, ...] = ("entropy", "routed_experts")
    for name in unasked:
        with pytest.raises(UnsupportedError, match=r"the engine gives no .*; set engine"):
            worker.infer_outputs([[SEQUENCE]], (name,))


def test_an_id_beyond_the_vocabulary_is_refused_before_the_model_sees_it(worker: EngineWorker) -> None:
    worker.engine.vocab_size = 3
    message = "token id 3 is beyond the model's vocabulary of 3: the sequences were made with another model's tokenizer"
    with pytest.raises(BatchError, match=message):
        worker.infer_outputs([[SEQUENCE]], ("log_probs",))
    with pytest.raises(BatchError, match=message):
        worker.train_batch([[SEQUENCE]], lambda output, _: (output.log_probs.sum(), {}))


def test_experts_that_would_not_be_used_are_refused(worker: EngineWorker) -> None:
    field = {"routed_experts": np.zeros((len(SEQUENCE), 1, 1), np.int64)}
    with pytest.raises(UnsupportedError, match=r"engine\.router_replay=false would leave unused"):
        worker.infer_batch([[replace(SEQUENCE, fields=field)]])
