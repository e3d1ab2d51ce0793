"""The judge of all parity checks: one process, one sequence of L tokens at a time, plain transformers, no engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import TokenOutput

Key = TypeVar("Key")


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
        sequences.append(Sequence(draw_ids(random, length, vocab_size), mask, {"weight": weight}))
    sequences[0].loss_mask[1:] = True
    return sequences


def draw_ids(random: np.random.Generator, length: int, vocab_size: int = 32) -> npt.NDArray[np.int64]:
    """Draw tokens of the tiny models but for 0, their padding token, whose row transformers' embedding never trains."""
    return random.integers(1, vocab_size, length)


def load_reference(folder: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """Load the plain model by a class of transformers, in float32 and eval mode."""
    import transformers  # ranks prepare before they import it

    return getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    )


def with_temperatures(sequences: list[Sequence], seed: int = 7) -> list[Sequence]:
    """Give each token a temperature of its own, between 0.5 and 2."""
    random = np.random.default_rng(seed)
    return [
        replace(sequence, fields={**sequence.fields, "temperature": random.uniform(0.5, 2, len(sequence)).astype("f4")})
        for sequence in sequences
    ]


def next_log_probs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Return [L, V]: log-probs of what comes after each token, at the temperature of the token that does."""
    ids = torch.from_numpy(sequence.token_ids)[None]
    options = {}
    if sequence.positions is not None:
        # Without a mask, transformers takes every jump of the positions for the beginning of another sequence.
        options = {"position_ids": torch.from_numpy(sequence.positions)[None], "attention_mask": torch.ones_like(ids)}
    logits_LV = model(input_ids=ids, use_cache=False, **options).logits[0]
    own = sequence.fields.get("temperature")
    divisor = temperature if own is None else torch.from_numpy(np.append(own[1:], np.float32(1)))[:, None]
    logp_LV: torch.Tensor = (logits_LV / divisor).log_softmax(-1)
    return logp_LV


def sequence_log_probs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Return [L]: log-prob of each token given those before it; 0 for the first."""
    ids = torch.from_numpy(sequence.token_ids)
    logp_LV = next_log_probs(model, sequence, temperature)
    return torch.cat([logp_LV.new_zeros(1), logp_LV[:-1].gather(-1, ids[1:, None])[:, 0]])


def masked_log_probs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Return [L], without gradient; 0 outside the loss, as an engine gives them."""
    with torch.no_grad():
        log_probs = sequence_log_probs(model, sequence, temperature)
    return torch.where(torch.from_numpy(sequence.loss_mask), log_probs, 0.0)


def accumulate(model: Any, sequences: list[Sequence], temperature: float = 1.0) -> tuple[float, float]:
    """Add d(sum over tokens / number of loss tokens) of the global batch to the model's gradients.

    Returns loss, and mean log-prob of the loss tokens.
    """
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    total_loss, total_log_prob = 0.0, 0.0
    for sequence in sequences:
        mask = torch.from_numpy(sequence.loss_mask)
        log_probs = sequence_log_probs(model, sequence, temperature)[mask]
        loss = -(log_probs * torch.from_numpy(sequence.fields["weight"])[mask]).sum() / num_tokens
        loss.backward()
        total_loss += float(loss.detach())
        total_log_prob += float(log_probs.detach().sum()) / num_tokens
    return total_loss, total_log_prob


def reference_gradient(folder: Path, sequences: list[Sequence], temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the gradient of a global batch, computed in float64."""
    model = load_reference(folder).double()
    accumulate(model, sequences, temperature)
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def relative_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any entry, relative to the largest entry of its tensor; inf if not finite."""
    return furthest_gradient(found, expected)[1]


def furthest_gradient(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """Return the weight whose gradient is off most, and by how much; see `relative_error`."""
    missing = sorted(expected.keys() - found.keys())
    assert not missing, f"no gradient for {', '.join(missing[:5])}"
    sizes = {name: gradient.abs().max().clamp_min(1e-12) for name, gradient in expected.items()}
    return furthest(
        {name: found[name] / size for name, size in sizes.items()},
        {name: expected[name] / size for name, size in sizes.items()},
    )


def furthest(found: Mapping[Key, torch.Tensor], expected: Mapping[Key, torch.Tensor]) -> tuple[Key, float]:
    """Return where two sets of tensors differ most, and by how much; inf where a difference is not finite."""
    assert expected, "nothing to compare"
    distances = {key: float((found[key] - tensor).abs().max()) for key, tensor in expected.items()}
    known = {key: distance if math.isfinite(distance) else math.inf for key, distance in distances.items()}
    worst = max(known, key=lambda key: known[key])
    return worst, known[worst]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return by how much any number of two lists of tensors differs; inf where a difference is not finite."""
    return furthest(dict(enumerate(found)), dict(enumerate(expected)))[1]


@dataclass
class ReferenceRun:
    """A plain model trained by torch's own AdamW and clipping."""

    folder: Path
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    decay_vectors: bool = False
    eps: float = 1e-8
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def train(self, batches: list[list[Sequence]], factors: list[float]) -> dict[str, torch.Tensor]:
        """Make one step per batch, each at its fraction of the learning rate; return the weights."""
        model = load_reference(self.folder)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [entry for entry in parameters if entry.ndim > 1], "weight_decay": self.weight_decay},
                {
                    "params": [entry for entry in parameters if entry.ndim <= 1],
                    "weight_decay": self.weight_decay if self.decay_vectors else 0.0,
                },
            ],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            eps=self.eps,
        )
        for sequences, factor in zip(batches, factors, strict=True):
            self.losses.append(accumulate(model, sequences)[0])
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)))
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.detach() for name, tensor in model.named_parameters()}
