"""A teacher's most likely ids and a student's log-probs of them, however the model ends and tokens are split."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from plugins.verl_fsdp.tests.test_head import write_model
from tests.repository import ROOT
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.reference import (
    load_reference,
    make_sequences,
    next_log_probs,
    with_temperatures,
)
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

pytestmark = pytest.mark.dist
V = 32


def functions_of_the_page() -> dict[str, Any]:
    """Return what docs/how-to/training-loop.md defines for distillation."""
    page = (ROOT / "docs" / "how-to" / "training-loop.md").read_text(encoding="utf-8")
    _, block = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(block, found)  # noqa: S102 - our own page
    return found


def distil(rank: int, folder: Path, settings: dict[str, Any], sequences: list[Sequence], k: int) -> dict[str, Any]:
    """Let a model teach itself."""
    page = functions_of_the_page()
    worker = EngineWorker(Fsdp2Config(learning_rate=1e-3, device="cpu", **settings), folder, rank, 2)
    worker.create()
    share = worker.engine.data_parallel
    taught = page["with_teacher"](worker, [sequences[share.rank :: share.size], []], k)
    for wrong, message in ((-1, "top_k=-1 ids of each"), (V + 1, f"top_k={V + 1} asks for more ids .*; use 1 to {V}")):
        with pytest.raises(BatchError, match=message):
            page["with_teacher"](worker, [sequences], wrong)
    beyond = Sequence(np.array([1, V]), np.array([False, True]))
    with pytest.raises(BatchError, match=f"token id {V} is beyond the model's vocabulary of {V}"):
        worker.infer_outputs([[beyond]], ("log_probs",))
    own = [beyond] if share.rank == 0 else [sequences[0]]
    reason = f"token id {V} is beyond" if own[0] is beyond else f"1 of {share.size} ranks refuse their micro-batches"
    with pytest.raises(BatchError, match=reason):  # on every rank: none waits for the one that refuses
        worker.train_batch([own], page["divergence"])
    report = worker.train_batch(taught, page["divergence"])
    return {"taught": taught[0], "report": report}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {"logit_chunk": 3, "entropy": "value"}),
        ("qwen3", {"sequence_parallel_size": 2}),
        ("gemma2", {"packing": False}),
        ("opt", {"packing": False}),
    ],
)
@pytest.mark.parametrize("k", [3, V])
def test_a_model_that_teaches_itself(
    tmp_path: Path, on_ranks: OnRanks, kind: str, settings: dict[str, Any], k: int
) -> None:
    folder = write_model(tmp_path / kind, kind)
    model, sequences = load_reference(folder), with_temperatures(make_sequences(6))
    for rank in on_ranks(distil, folder, settings, sequences, k):
        for sequence in rank["taught"]:
            ids, log_probs, mask = (
                sequence.fields["top_k_ids"],
                sequence.fields["teacher_log_probs"],
                sequence.loss_mask,
            )
            assert (ids.dtype, ids.shape) == (np.int64, (len(mask), k))
            assert not ids[~mask].any()
            assert not log_probs[~mask].any()
            with torch.no_grad():
                right = next_log_probs(model, sequence).roll(1, dims=0)
            torch.testing.assert_close(
                torch.from_numpy(log_probs)[mask], right.topk(k).values[mask], rtol=1e-5, atol=1e-5
            )
            assert all(len(set(row)) == k for row in ids[mask].tolist())
        assert abs(rank["report"].loss) <= 1e-6  # log-probs are the teacher's own
        if k == V:  # over all ids the divergence from itself is at its lowest
            assert rank["report"].optimizer.grad_norm <= 1e-5
        else:
            assert rank["report"].optimizer.grad_norm > 1e-2
