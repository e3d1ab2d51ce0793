"""Critics: an engine with ``head: value``, against transformers' plain model for token classification."""

from pathlib import Path
from typing import Any, Final

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import TokenOutput
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.driver import Driver, differences, same
from verl_engine.testing.conformance.reference import largest_difference, load_reference, make_sequences

TOLERANCE: Final = 1e-5
CRITIC: Final = "AutoModelForTokenClassification"


def state_before_token(bench: Bench) -> None:
    """The value of a token is that of the state in which it was chosen: what the plain model says of the one before."""
    driver = bench.driver("critic", head="value")
    _require_values(bench, driver, bench.model("critic"), "the folder's")


def gradient(bench: Bench) -> None:
    """A loss on values has the gradient of the plain model, and the head no dropout even where the model's is drawn."""
    sequences = make_sequences(8)
    probe = bench.probe("critic", head="value", **bench.with_dropout())
    found = probe.gradient(probe.driver.micro_batches(sequences, len(sequences)), value_loss)
    expected = _reference_gradient(bench.model("critic"), sequences)
    bench.require_gradient(found, expected, "the gradient of a loss on values")


def new_head(bench: Bench) -> None:
    """From a language model's folder a critic gets its layers and a new head, the same with the same seed."""
    first, second = (bench.driver(head="value", seed=3).weights() for _ in range(2))
    bench.require_same(second, first, "two critics of one seed are not the same")
    trunk = {name: tensor for name, tensor in bench.driver().weights().items() if name in first}
    bench.require(
        bool(trunk) and same({name: first[name] for name in trunk}, trunk),
        f"the critic's layers are not the language model's: {differences(first, {**first, **trunk})}",
    )
    outputs = [tuple(tensor.shape) for name, tensor in first.items() if name not in trunk]
    bench.require(
        bool(outputs) and all(shape[0] == 1 for shape in outputs),
        f"what a critic has besides a language model's layers must be a head of one output; shapes {outputs}",
    )


def saved_folder(bench: Bench) -> None:
    """A trained critic's saved folder loads in transformers as a token classifier that gives the same values."""
    driver = bench.driver(head="value", learning_rate=1e-2)
    sequences = make_sequences(8)
    for _ in range(2):
        driver.step(driver.micro_batches(sequences, len(sequences)), value_loss)
    folder = bench.folder / "saved"
    driver.engine.save_pretrained(folder)
    _require_values(bench, driver, folder, "the saved folder's")


def value_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of squares of what values are off by, over the loss tokens."""
    mask = batch.loss_mask
    target = batch.fields["weight"][mask] if batch.fields else 0.0
    return (output.values[mask] - target).square().sum(), {}


def sequence_values(model: Any, sequence: Sequence) -> torch.Tensor:
    """Return [L]: the value of the state before each token; 0 for the first, which has none."""
    ids = torch.from_numpy(sequence.token_ids)
    states_L = model(input_ids=ids[None], use_cache=False).logits[0, :, 0]
    return torch.cat([states_L.new_zeros(1), states_L[:-1]])


def _require_values(bench: Bench, driver: Driver, folder: Path, whose: str) -> None:
    model = load_reference(folder, CRITIC)
    labels = model.config.num_labels
    bench.require(labels == 1, f"{whose} model has {labels} labels; a value is one number")
    sequences = make_sequences(6)
    found = [part for sequence in sequences for part in driver.infer([sequence])]
    with torch.no_grad():
        expected = [
            torch.where(torch.from_numpy(sequence.loss_mask), sequence_values(model, sequence), 0.0)
            for sequence in sequences
        ]
    worst = largest_difference(found, expected)
    bench.require(worst <= TOLERANCE, f"values are off by {worst:.3g} against {whose} plain model, 0 outside the loss")


def _reference_gradient(folder: Path, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    model = load_reference(folder, CRITIC).double()
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    for sequence in sequences:
        mask = torch.from_numpy(sequence.loss_mask)
        target = torch.from_numpy(sequence.fields["weight"])[mask]
        ((sequence_values(model, sequence)[mask] - target).square().sum() / num_tokens).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


CHECKS = (
    Check("values/state_before_token", (all_ranks(state_before_token),), ("value_head",)),
    Check("values/gradient", (all_ranks(gradient),), ("value_head",)),
    Check("values/new_head", (all_ranks(new_head),), ("value_head",)),
    Check("values/saved_folder", (all_ranks(saved_folder),), ("value_head",)),
)
