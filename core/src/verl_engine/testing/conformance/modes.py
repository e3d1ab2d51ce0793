"""Train and eval mode, on a model with dropout."""

from typing import Final

from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.reference import (
    accumulate,
    largest_difference,
    load_reference,
    make_sequences,
    masked_log_probs,
)

STILL: Final = 1e-12
"""A learning rate that moves nothing."""


def inference_is_in_eval_mode(bench: Bench) -> None:
    """Inference uses no dropout, after a training step too."""
    driver = bench.driver("dropout", learning_rate=STILL)
    sequences = make_sequences(6)
    model = load_reference(bench.model("dropout"))
    for when in ("of a fresh engine", "after a training step"):
        expected = [masked_log_probs(model, sequence) for sequence in sequences]
        worst = largest_difference(driver.infer(sequences), expected)
        bench.require(
            worst <= 1e-5,  # noqa: PLR2004 - float32
            f"log-probs {when} are {worst:.3g} nats from those without dropout: the model is left in train mode",
        )
        driver.train(sequences)


def training_is_in_train_mode(bench: Bench) -> None:
    """A training step draws the model's dropout where it is asked for, after an inference too; each step another."""
    driver = bench.driver("dropout", learning_rate=STILL)
    sequences = make_sequences(8)
    without_dropout, _ = accumulate(load_reference(bench.model("dropout")), sequences)
    losses = []
    for _ in range(3):
        losses.append(driver.train(sequences).loss)
        driver.infer(sequences)
    distances = [abs(loss - without_dropout) for loss in losses]
    bench.require(
        min(distances) > 1e-6,  # noqa: PLR2004 - float32's rounding is less, and dropout's chance to come as near is slim
        f"losses {losses} of training steps equal that without dropout, {without_dropout}: left in eval mode",
    )
    bench.require(len(set(losses)) == len(losses), f"each step drew the same dropout: losses {losses}")


def dropout_is_off(bench: Bench) -> None:
    """By default a training step draws no dropout, whatever the model's config says."""
    driver = bench.driver("dropout", learning_rate=STILL, dropout="off")
    sequences = make_sequences(8)
    without_dropout, _ = accumulate(load_reference(bench.model("dropout")), sequences)
    loss = driver.train(sequences).loss
    bench.require(
        abs(loss - without_dropout) <= 1e-5,  # noqa: PLR2004 - float32
        f"with dropout=off the loss {loss} of a training step is not that without dropout, {without_dropout}",
    )


CHECKS = (
    Check("modes/inference", (all_ranks(inference_is_in_eval_mode),)),
    Check("modes/training", (all_ranks(training_is_in_train_mode),), ("dropout",)),
    Check("modes/dropout_off", (all_ranks(dropout_is_off),)),
)
