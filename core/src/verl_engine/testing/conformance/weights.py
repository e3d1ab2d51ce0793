"""Weights out of the engine and into it, full or in shards, under Hugging Face names."""

import dataclasses
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import WeightShard
from verl_engine.engine.weights.shards import assemble_weights
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.driver import all_equal, same
from verl_engine.testing.conformance.reference import load_reference, make_sequences


def export(bench: Bench) -> None:
    """A fresh engine exports what its model folder holds: names, shapes and values."""
    _export(bench, "plain")


def tied(bench: Bench) -> None:
    """Tied weights are exported once."""
    _export(bench, "tied")


def _export(bench: Bench, kind: str) -> None:
    driver = bench.driver(kind)
    expected = weights_of(bench.model(kind))
    specs = driver.engine.weight_specs()
    names = [spec.name for spec in specs]
    bench.require(len(names) == len(set(names)), f"weight_specs lists a name twice: {names}")
    odd = sorted(set(names) ^ expected.keys())
    bench.require(not odd, f"weight_specs and the Hugging Face folder do not have the same names: {', '.join(odd[:5])}")
    wrong = [spec.name for spec in specs if spec.shape != tuple(expected[spec.name].shape)]
    bench.require(not wrong, f"weight_specs gives a wrong shape for {', '.join(wrong[:5])}")
    found = driver.weights()
    bench.require(list(found) == names, "full_weights yields other names than it was asked for")
    dtypes = [spec.name for spec in specs if found[spec.name].dtype != spec.dtype]
    bench.require(not dtypes, f"weight_specs gives a wrong dtype for {', '.join(dtypes[:5])}")
    same_dtype = {name: tensor.to(found[name].dtype) for name, tensor in expected.items()}
    bench.require_same(found, same_dtype, "exported and loaded weights")
    some = names[1::2]
    part = [name for name, _ in driver.engine.full_weights(some)]
    bench.require(part == some, f"full_weights({some}) yielded {part}")


def whole_import(bench: Bench) -> None:
    """Another model's weights go in, in any order, and come out the same; log-probs follow."""
    for kind, other in (("plain", "other"), ("tied", "tied")):
        driver, source = bench.driver(kind), bench.driver(other)
        source.train(make_sequences(8))
        weights = source.weights()
        driver.engine.load_full_weights(reversed(weights.items()))
        bench.require_same(driver.weights(), weights, f"imported and exported again ({kind} model)")
        is_used = all_equal(driver.infer(make_sequences(3)), source.infer(make_sequences(3)))
        bench.require(is_used, f"imported weights are not used ({kind} model)")


def import_refusals(bench: Bench) -> None:
    """Weights that do not fit are refused with a WeightsError, on every rank: unknown, misshaped, missing, doubled."""
    driver = bench.driver()
    weights = driver.weights()
    name, tensor = next(iter(weights.items()))
    wrong: dict[str, list[tuple[str, torch.Tensor]]] = {
        "an unknown name": [("no.such.weight", tensor), *weights.items()],
        "a wrong shape": [(name, tensor[1:]), *list(weights.items())[1:]],
        "a missing weight": list(weights.items())[1:],
        "a weight that comes twice": [*weights.items(), (name, tensor)],
    }
    for what, given in wrong.items():
        message = refusal(WeightsError, partial(driver.engine.load_full_weights, iter(given)))
        bench.require(message is not None, f"load_full_weights takes {what} silently")
    driver.engine.load_full_weights(weights.items())


def saved_folder(bench: Bench) -> None:
    """A saved folder loads in transformers, with the exported weights bit for bit, tied or not."""
    for kind in ("plain", "tied"):
        driver = bench.driver(kind)
        driver.train(make_sequences(8))
        driver.infer(make_sequences(3))  # between a training step and a save there is often an evaluation
        folder = bench.folder / kind
        for _ in range(2):  # the second time over the first
            driver.engine.save_pretrained(folder)
        found = driver.weights()
        saved = {name: tensor.to(found[name].dtype) for name, tensor in weights_of(folder).items() if name in found}
        bench.require_same(saved, found, f"saved and exported weights ({kind} model)")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        bench.require(
            config.get("architectures") == ["Qwen3ForCausalLM"],
            f"config.json of the saved folder says architectures={config.get('architectures')}",
        )
        loaded = load_reference(folder).state_dict()
        misread = [name for name, tensor in found.items() if not torch.equal(loaded[name], tensor.float())]
        bench.require(not misread, f"transformers reads other values for {', '.join(misread[:5])}")


def shards(bench: Bench) -> None:
    """The ranks' shards, laid at the offsets they name, are the exported weights, bit for bit; tied or not."""
    for kind in ("plain", "tied"):
        driver = bench.driver(kind)
        driver.train(make_sequences(8))
        driver.infer(make_sequences(3))
        specs = driver.engine.weight_specs()
        own = copies(driver.engine.weight_shards())
        names = [shard.name for shard in own]
        bench.require(
            names == [spec.name for spec in specs],
            f"weight_shards yields {names[:5]}… where weight_specs has {[spec.name for spec in specs][:5]}… ({kind})",
        )
        wrong = ""
        found: dict[str, torch.Tensor] = {}
        try:
            found = dict(assemble_weights(specs, [shard for shards in bench.gather(own) for shard in shards]))
        except WeightsError as error:
            wrong = str(error)
        bench.require(not wrong, f"the ranks' shards do not make full weights: {wrong}")
        bench.require_same(found, driver.weights(), f"sharded and full weights ({kind} model)")


def shard_replicas(bench: Bench) -> None:
    """Each shard says which ranks hold the same one, and whether a lower rank does."""
    own = [shard for shard in bench.driver().engine.weight_shards() if shard.tensor.numel()]
    keys = [(shard.name, shard.offsets, tuple(shard.tensor.shape)) for shard in own]
    holders: dict[tuple[object, ...], list[int]] = {}
    for rank, held in enumerate(bench.gather(keys)):
        for key in held:
            holders.setdefault(key, []).append(rank)
    wrong = []
    for shard, key in zip(own, keys, strict=True):
        ranks = holders[key]
        right = (tuple(ranks), ranks[0] != bench.rank) if len(ranks) > 1 else ((), False)
        if (shard.replicas, shard.is_replica) != right:
            wrong.append(f"{shard.name}: {shard.replicas}, {shard.is_replica}, not {right[0]}, {right[1]}")
    bench.require(not wrong, f"replicas and is_replica of shards are wrong: {'; '.join(wrong[:2])}")


def shards_import(bench: Bench) -> None:
    """Another engine's shards go in, in any order, and are used; training goes on from them."""
    for kind, other in (("plain", "other"), ("tied", "tied")):
        driver, source = bench.driver(kind), bench.driver(other)
        for each in (driver, source):
            each.train(make_sequences(8))
        source.train(make_sequences(8, seed=1))
        driver.engine.load_weight_shards(reversed(copies(source.engine.weight_shards())))
        bench.require_same(driver.weights(), source.weights(), f"imported in shards and exported ({kind} model)")
        is_used = all_equal(driver.infer(make_sequences(3)), source.infer(make_sequences(3)))
        bench.require(is_used, f"imported shards are not used ({kind} model)")
        before = driver.weights()
        driver.train(make_sequences(8, seed=2))
        bench.require(not same(driver.weights(), before), f"imported shards are not trained ({kind} model)")


def shards_refusals(bench: Bench) -> None:
    """Shards that are not this rank's are refused with a WeightsError: unknown, misplaced, missing, doubled."""
    driver = bench.driver()
    own = copies(driver.engine.weight_shards())
    odd = next(index for index, shard in enumerate(own) if shard.tensor.numel() and shard.offsets)
    moved = dataclasses.replace(own[odd], offsets=tuple(offset + 1 for offset in own[odd].offsets))
    wrong: dict[str, list[WeightShard]] = {
        "an unknown name": [dataclasses.replace(own[odd], name="no.such.weight"), *own],
        "a shard that belongs elsewhere": [*own[:odd], moved, *own[odd + 1 :]],
        "a missing shard": own[1:],
        "a shard that comes twice": [*own, own[odd]],
    }
    for what, given in wrong.items():
        message = refusal(WeightsError, partial(driver.engine.load_weight_shards, iter(given)))
        bench.require(message is not None, f"load_weight_shards takes {what} silently")
    driver.engine.load_weight_shards(own)


def copies(shards: Iterable[WeightShard]) -> list[WeightShard]:
    """Take shards that stay as they are, on the CPU."""
    return [dataclasses.replace(shard, tensor=shard.tensor.detach().cpu().clone()) for shard in shards]


def weights_of(folder: Path) -> dict[str, Any]:
    """Read what a folder's safetensors files hold; tied weights are there once."""
    from safetensors.torch import load_file  # comes with transformers

    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


CHECKS = (
    Check("weights/export", (all_ranks(export),)),
    Check("weights/tied", (all_ranks(tied),)),
    Check("weights/import", (all_ranks(whole_import),), ("weight_import",)),
    Check("weights/import_refusals", (all_ranks(import_refusals),), ("weight_import",)),
    Check("weights/saved_folder", (all_ranks(saved_folder),)),
    Check("weights/shards", (all_ranks(shards),), ("weight_shards",)),
    Check("weights/shard_replicas", (all_ranks(shard_replicas),), ("weight_shards", "multi_rank")),
    Check("weights/shards_import", (all_ranks(shards_import),), ("weight_shards",)),
    Check("weights/shards_refusals", (all_ranks(shards_refusals),), ("weight_shards",)),
)
