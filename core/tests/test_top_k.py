"""Log-probs of other ids in a token's place: which ids are found, and that values and gradients are log_softmax's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from core.tests.fake_engine import FakeEngine, toy_host
from core.tests.largest_tensor import LargestTensor
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError, UnsupportedError
from verl_engine.engine.linear_log_probs import Entropy, linear_log_probs
from verl_engine.engine.output_from_logits import output_from_logits
from verl_engine.engine.temperature import Temperature, column
from verl_engine.engine.top_k import fill_top_ids, ids_of_keys, top_keys
from verl_engine.engine.train_step import train_step

if TYPE_CHECKING:
    import numpy.typing as npt

M, V, H, K = 9, 70, 3, 4
EACH = torch.linspace(0.5, 2.0, M)


def top_ids(logits: list[float], k: int, dtype: torch.dtype = torch.float32) -> list[int]:
    ids = torch.zeros(1, k, dtype=torch.int64)
    fill_top_ids(ids, torch.tensor([logits], dtype=dtype), k)
    return ids[0].tolist()


def test_the_highest_come_first_and_of_equal_ones_the_lowest_id() -> None:
    inf = float("inf")
    assert top_ids([0.0, 3.0, -0.0, 3.0, -1.0, -inf, inf, -2.5], 8) == [6, 1, 3, 0, 2, 4, 7, 5]
    assert top_ids([1.0, 1.001, 1.002], 2, torch.bfloat16) == [0, 1]  # bfloat16 holds one number for all three
    assert top_ids([1.0, 1.001, 1.002], 2, torch.float64) == [2, 1]


def test_more_ids_than_there_are_is_refused() -> None:
    with pytest.raises(BatchError, match="top_k=3 asks for more ids than the vocabulary has; use 1 to 2"):
        top_ids([0.0, 1.0], 3)


def test_the_highest_of_all_parts_are_the_highest_of_the_whole() -> None:
    logits = torch.randint(0, 4, (M, V), generator=torch.Generator().manual_seed(0)).float()  # full of ties
    parts = [top_keys(logits[:, start : start + 7], K, start) for start in range(0, V, 7)]
    assert torch.equal(torch.cat(parts, 1).topk(K).values, top_keys(logits, K))
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :K]
    assert torch.equal(ids_of_keys(top_keys(logits, K)), expected)


def leaves(dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (M, V)]


@pytest.mark.parametrize("top_k", [0, K, V])
@pytest.mark.parametrize("entropy", ["off", "gradient"])
@pytest.mark.parametrize("chunk", [2, 256])
@pytest.mark.parametrize("temperature", [0.7, EACH], ids=["one", "each"])
def test_values_and_gradients_are_those_of_log_softmax(
    temperature: Temperature, chunk: int, entropy: Entropy, top_k: int
) -> None:
    hidden, weight = leaves()
    ids = torch.randint(0, V, (M, 1 + (top_k or K)), generator=torch.Generator().manual_seed(1))
    given = ids.clone()
    found, _ = linear_log_probs(hidden, weight, ids, temperature, chunk=chunk, entropy=entropy, top_k=top_k)
    logits = hidden @ weight.T
    if top_k:
        given[:, 1:] = logits.topk(top_k).indices
    assert torch.equal(ids, given)
    expected = (logits / column(temperature)).log_softmax(-1).gather(1, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    own, right = (torch.autograd.grad((factors * value).sum(), (hidden, weight)) for value in (found, expected))
    for one, other in zip(own, right, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight = leaves()
    chunk = 2
    with LargestTensor() as made:
        linear_log_probs(hidden, weight, torch.zeros(M, 1 + K, dtype=torch.int64), chunk=chunk, top_k=K)
    assert made.numel <= max(chunk * V, weight.numel()) < M * V


def sequence(ids: npt.NDArray[Any] | None = None) -> Sequence:
    fields = {} if ids is None else {"top_k_ids": ids}
    return Sequence(np.array([1, 2, 0]), np.array([False, True, False]), fields)


def test_an_example_worked_by_hand() -> None:
    # The place of the loss token has logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8.
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    given = output_from_logits(logits, PackedBatch.from_sequences([sequence(np.array([[9, 9], [0, 2], [9, 9]]))]), 1.0)
    torch.testing.assert_close(given.top_k_log_probs.exp(), torch.tensor([[1.0, 1], [1 / 8, 5 / 8], [1, 1]]))
    torch.testing.assert_close(given.log_probs.exp(), torch.tensor([1.0, 5 / 8, 1]))
    found = output_from_logits(logits, PackedBatch.from_sequences([sequence()], top_k=2), 1.0, "value")
    assert found.top_k_ids.tolist() == [[0, 0], [2, 1], [0, 0]]
    torch.testing.assert_close(found.top_k_log_probs.exp(), torch.tensor([[1.0, 1], [5 / 8, 2 / 8], [1, 1]]))
    assert found.entropy[1] > 0


def test_what_was_not_asked_for_is_an_error_but_for_a_micro_batch_without_sequences() -> None:
    plain = output_from_logits(torch.zeros(1, 3), PackedBatch.from_sequences([sequence()]), 1.0)
    with pytest.raises(UnsupportedError, match="gives no top-k log-probs; set top_k_ids of the sequences"):
        _ = plain.top_k_log_probs
    with pytest.raises(UnsupportedError, match="gives no top-k ids; set top_k of the batch"):
        _ = plain.top_k_ids
    logits = torch.zeros(0, 3, requires_grad=True)
    empty = output_from_logits(logits, PackedBatch.from_sequences([]), 1.0).top_k_log_probs
    assert empty.shape == (1, 0)
    assert empty.requires_grad


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int64), np.zeros((3, 2)), np.full((3, 2), -1)])
def test_what_are_no_ids_is_refused(wrong: npt.NDArray[Any]) -> None:
    with pytest.raises(BatchError, match=r"top_k_ids must be \[L, k\] integers, 0 or more; they are"):
        sequence(wrong)


def test_ids_are_refused_where_the_backend_would_not_use_them() -> None:
    batch = PackedBatch.from_sequences([sequence(np.zeros((3, 2), np.int32))])
    with pytest.raises(UnsupportedError, match="cannot do 'top_k_log_probs'"):
        train_step(toy_host(), FakeEngine(), [batch], lambda output, _: (output.log_probs.sum(), {}))
