"""The judge of all parity tests: one process, one sequence at a time, float32, no engine.

Shape legend: L tokens of one sequence, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from verl_engine.batch.sequence import Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput


def weighted_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of -weight * log-prob over the loss tokens: linear in what the accumulation must get right."""
    mask = batch.loss_mask
    # An empty micro-batch has no fields.
    weight = batch.fields["weight"][mask] if batch.fields else 0.0
    loss = -(output.log_probs[mask] * weight).sum()
    return loss, {"log_prob": output.log_probs.detach().sum()}


def make_sequences(num: int, seed: int = 0, vocab_size: int = 32) -> list[Sequence]:
    """Draw sequences of 1 to 17 tokens, with uneven loss masks and weights of both signs."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(random.integers(1, 18))
        mask = random.random(length) < random.random()
        mask[0] = False
        weight = random.normal(size=length).astype(np.float32)
        sequences.append(Sequence(random.integers(0, vocab_size, length), mask, {"weight": weight}))
    sequences[0].loss_mask[1:] = True
    return sequences


def load_reference(folder: Path) -> Any:
    """Load the plain model."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def sequence_log_probs(model: Any, sequence: Sequence) -> torch.Tensor:
    """Return [L]: log-prob of each token given those before it; 0 for the first."""
    ids = torch.from_numpy(sequence.token_ids)
    logp_LV = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logp_LV[:-1].gather(-1, ids[1:, None])[:, 0]])


def reference_gradient(folder: Path, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    """Return d(sum over tokens / number of loss tokens) of the global batch."""
    model = load_reference(folder).double()
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    for sequence in sequences:
        mask = torch.from_numpy(sequence.loss_mask)
        weight = torch.from_numpy(sequence.fields["weight"])
        loss = -(sequence_log_probs(model, sequence)[mask] * weight[mask]).sum() / num_tokens
        loss.backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any gradient entry, relative to the largest entry of its tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items())
