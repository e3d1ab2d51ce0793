"""Low-rank adapters: trained alone, exported merged, switched off, written as a peft folder. The kit needs no peft.

Shape legend: O outputs and I inputs of a layer, R the adapter's rank.
"""

import json
from contextlib import suppress
from typing import Any, Final

import torch

from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.driver import Driver, same
from verl_engine.testing.conformance.reference import (
    furthest,
    largest_difference,
    load_reference,
    make_sequences,
    masked_log_probs,
)
from verl_engine.testing.conformance.weights import weights_of

RANK: Final = 3
SCALE: Final = 2.0
SETTINGS: Final[dict[str, Any]] = {"lora": {"rank": RANK, "alpha": RANK * SCALE}, "learning_rate": 1e-2}
NUM_LINEAR: Final = 7
"""Linear layers in each block of the kit's model."""
_PREFIX: Final = "base_model.model."


def train(bench: Bench) -> None:
    """A fresh adapter does nothing; training changes every linear layer by its rank and no more, and nothing else."""
    driver = bench.driver(**SETTINGS)
    base = weights_of(bench.model())
    bench.require_same(driver.weights(), base, "before training, exported weights and the folder's")
    driver.train_on(0, 1)
    weights = driver.weights()
    changed = {name for name, tensor in weights.items() if not torch.equal(tensor, base[name])}
    linear = {name for name in base if name.endswith("_proj.weight")}
    assert len(linear) % NUM_LINEAR == 0
    bench.require(
        changed == linear,
        f"training an adapter on all-linear must change the linear layers and nothing else; unchanged: "
        f"{sorted(linear - changed)[:5]}, changed besides: {sorted(changed - linear)[:5]}",
    )
    ranks = {name: int(torch.linalg.matrix_rank(weights[name] - base[name], rtol=1e-3)) for name in sorted(linear)}
    over = [name for name, rank in ranks.items() if rank > RANK]
    bench.require(not over, f"changed by more than rank {RANK}: {', '.join(over[:5])}")


def merged(bench: Bench) -> None:
    """A saved folder is the merged model: transformers alone gives the log-probs that the engine gives."""
    driver = _trained(bench)
    folder = bench.folder / "merged"
    driver.engine.save_pretrained(folder)
    bench.require_same(weights_of(folder), driver.weights(), "saved and exported weights")
    sequences = make_sequences(4, seed=2)
    model = load_reference(folder)
    error = largest_difference(driver.infer(sequences), [masked_log_probs(model, sequence) for sequence in sequences])
    bench.require(
        error <= 1e-4,  # noqa: PLR2004
        f"log-probs of the saved folder are off by {error:.3g} nats from the engine's: the adapter is lost or scaled",
    )


def disabled(bench: Bench) -> None:
    """With its adapter disabled, also twice, the model is the base policy; afterwards not, after an exception too."""
    driver = _trained(bench)
    sequences = make_sequences(4, seed=2)
    trained = driver.infer(sequences)
    base = bench.driver().infer(sequences)
    with driver.engine.disable_adapter():
        with driver.engine.disable_adapter():
            inner = driver.infer(sequences)
        outer = driver.infer(sequences)
    for what, found in (("inside", inner), ("after an inner context ended", outer)):
        error = largest_difference(found, base)
        bench.require(error <= 1e-6, f"{what}, log-probs are off by {error:.3g} from the base's")  # noqa: PLR2004
    with suppress(_ExpectedError), driver.engine.disable_adapter():
        raise _ExpectedError
    error = largest_difference(driver.infer(sequences), trained)
    bench.require(error == 0, f"after the context log-probs are off by {error:.3g}: the adapter is not back")
    before = driver.weights()
    driver.train(make_sequences(8, seed=3))
    bench.require(not same(driver.weights(), before), "after the context the adapter is not trained")


def adapter_folder(bench: Bench) -> None:
    """A saved adapter folder is one that peft reads; its matrices, merged by hand, give the exported weights."""
    driver = _trained(bench)
    folder = bench.folder / "adapter"
    for _ in range(2):  # the second time over the first
        driver.engine.save_adapter(folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    said = {key: config.get(key) for key in ("peft_type", "r", "lora_alpha")}
    bench.require(
        said == {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE}, f"adapter_config.json says {said}"
    )
    matrices = weights_of(folder)
    expected = weights_of(bench.model())
    for name, a_RI in matrices.items():
        layer, is_a, _ = name.removeprefix(_PREFIX).partition(".lora_A.weight")
        if is_a:
            b_OR = matrices[f"{_PREFIX}{layer}.lora_B.weight"]
            expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + SCALE * (b_OR.float() @ a_RI.float())
    weights = driver.weights()
    worst, error = furthest(expected, weights)
    bench.require(
        error <= 1e-6,  # noqa: PLR2004
        f"base and saved adapter, merged by hand, differ from the exported weights by {error:.3g} in {worst}",
    )


def adapter_weights(bench: Bench) -> None:
    """The adapter alone goes through weight buckets unmerged: the matrices of its folder, and nothing else."""
    driver = _trained(bench)
    folder = bench.folder / "unmerged"
    driver.engine.save_adapter(folder)
    found = driver.delivered(1 << 12, adapter_only=True)
    bench.require_same(found, weights_of(folder), "the adapter's weights from buckets and those of its folder")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    said = driver.engine.adapter_config()
    bench.require(said == config, f"adapter_config() gives {said}, and adapter_config.json says {config}")


def snapshot(bench: Bench) -> None:
    """A snapshot brings the adapter back, and holds nothing of the model's own weights."""
    driver = _trained(bench)
    snapshots = driver.snapshots()
    kept = driver.weights()
    num_bytes = snapshots.save("kept").num_bytes
    driver.train(make_sequences(8, seed=2))
    snapshots.restore("kept")
    bench.require_same(driver.weights(), kept, "restored and saved weights")
    whole = bench.driver().snapshots().save("whole").num_bytes
    # The kit's model is so small that its adapters are a third of it.
    bench.require(
        num_bytes < whole / 2, f"a snapshot with adapters holds {num_bytes} bytes, one of the whole model {whole}"
    )


def unknown_layers(bench: Bench) -> None:
    """Layers that the model does not have are refused with a ModelError that names some it has."""
    message = refusal(ModelError, lambda: bench.driver(lora={"target_modules": ("no_such_layer",)})) or ""
    bench.require(
        "no_such_layer" in message and "q_proj" in message,
        f"engine.lora.target_modules=no_such_layer must raise a ModelError that names it and q_proj; got {message!r}",
    )


class _ExpectedError(Exception):
    """Raised by a check, to see what is left behind."""


def _trained(bench: Bench) -> Driver:
    driver = bench.driver(**SETTINGS)
    driver.train_on(0, 1)
    return driver


CHECKS = (
    Check("lora/train", (all_ranks(train),), ("lora",)),
    Check("lora/merged", (all_ranks(merged),), ("lora",)),
    Check("lora/disabled", (all_ranks(disabled),), ("lora",)),
    Check("lora/adapter_folder", (all_ranks(adapter_folder),), ("lora",)),
    Check("lora/adapter_weights", (all_ranks(adapter_weights),), ("lora",)),
    Check("lora/snapshot", (all_ranks(snapshot),), ("lora", "snapshots")),
    Check("lora/unknown_layers", (all_ranks(unknown_layers),), ("lora",)),
)
