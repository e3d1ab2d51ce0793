"""A checkpoint as a Hugging Face folder, on one process and with bounded memory; adapters are merged in."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from verl_engine.contract.errors import ConfigError, PluginImportError, WeightsError
from verl_engine.engine.checkpoints.folders import sync_folder, write_file
from verl_engine.engine.checkpoints.manifest import MODEL_FOLDER, CheckpointManifest, copy_model_files
from verl_engine.engine.checkpoints.reader import CheckpointReader
from verl_engine.engine.weights.module_weights import LowRank, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHARD_BYTES: Final = 2 * 1024**3
_BASE: Final = ".base_layer."


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    num_weights: int
    num_bytes: int
    files: tuple[str, ...]
    """Those that hold weights."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an exported weight comes from."""

    name: str
    """In the checkpoint."""
    adapter: tuple[str, str] | None
    """Names of A and B that are merged in."""
    dtype: torch.dtype
    num_bytes: int


def export_checkpoint(
    folder: Path,
    output: Path,
    *,
    dtype: str | None = None,
    model_folder: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_shard: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the weights of a checkpoint with config and tokenizer, as transformers and rollout engines load them.

    Memory is that of one file of weights and the largest weight. The folder appears when it is whole.

    Args:
        folder: a whole checkpoint.
        output: does not exist yet.
        dtype: of floating-point weights, such as ``bfloat16``; by default as they are in the checkpoint.
        model_folder: takes the place of the config and tokenizer files that the checkpoint remembers.
        shard_bytes: largest size of a file of weights, but for a single weight that is larger.
        on_shard: told which file is being written, from 1, and how many there are.
    Raises:
        ConfigError: `output` exists, or there is no config.
        WeightsError: the checkpoint is not whole, or damaged.
        PluginImportError: safetensors is not installed.
    """
    if output.exists():
        raise ConfigError(f"--output {output} exists already; give a new folder, or remove it first")
    manifest = CheckpointManifest.read(folder)
    files_from = model_folder or folder / MODEL_FOLDER
    if not (files_from / "config.json").is_file():
        raise ConfigError(
            f"{files_from} holds no config.json; give the model folder that the run began with: --model MODEL_FOLDER"
        )
    sources = _sources(manifest, None if dtype is None else _float_dtype(dtype))
    shards = _divide(sources, shard_bytes)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_files(files_from, partial, manifest, sources)
        names = _write_shards(CheckpointReader(folder), manifest, sources, shards, partial, on_shard)
        sync_folder(partial)
        partial.rename(output)
        sync_folder(output.parent)
    finally:  # where the disk is full, others need the room
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(output, len(sources), sum(source.num_bytes for source in sources.values()), tuple(names))


def _sources(manifest: CheckpointManifest, dtype: torch.dtype | None) -> dict[str, _Source]:
    """Map exported names to what they are made of; names of adapted layers become plain ones."""
    found = {}
    for name, weight in manifest.weights.items():
        layer, is_adapter, _ = name.partition(".lora_")
        if is_adapter:
            continue
        own = _dtype(weight.dtype)
        target = dtype if dtype is not None and own.is_floating_point else own
        layer, is_base, rest = name.partition(_BASE)
        adapter = _adapter_of(layer, manifest) if is_base and rest == "weight" else None
        size = target.itemsize * torch.Size(weight.shape).numel()
        found[name.replace(_BASE, ".")] = _Source(name, adapter, target, size)
    return found


def _adapter_of(layer: str, manifest: CheckpointManifest) -> tuple[str, str]:
    """Return the names of A and B beside a layer.

    Raises:
        WeightsError: there are other than one of each, or the manifest does not say how they are scaled.
    """
    first, second = (
        [name for name in manifest.weights if name.startswith(f"{layer}.lora_{which}.")] for which in ("A", "B")
    )
    if len(first) != 1 or len(second) != 1 or manifest.lora is None:
        raise WeightsError(
            f"the adapter of {layer} cannot be merged: it needs one A, one B and the manifest's lora, and has "
            f"{first}, {second} and {manifest.lora}"
        )
    return first[0], second[0]


def _divide(sources: dict[str, _Source], shard_bytes: int) -> list[list[str]]:
    """Divide names over files, in order, none above the size but for single large weights."""
    shards: list[list[str]] = []
    size = shard_bytes + 1
    for name, source in sources.items():
        if size + source.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += source.num_bytes
    return shards


def _write_shards(
    reader: CheckpointReader,
    manifest: CheckpointManifest,
    sources: dict[str, _Source],
    shards: list[list[str]],
    partial: Path,
    on_shard: Callable[[int, int], None] | None,
) -> list[str]:
    """Write one file after the other, and where there are several an index; return their names."""
    try:
        from safetensors.torch import save_file  # only exports need it
    except ImportError as error:
        raise PluginImportError(
            f"an export needs safetensors ({error}); install it: pip install safetensors"
        ) from error
    files = []
    for number, names in enumerate(shards, 1):
        if on_shard is not None:
            on_shard(number, len(shards))
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            dict(_weights(reader, manifest, {name: sources[name] for name in names})), partial / file, {"format": "pt"}
        )
        _sync(partial / file)
        files.append(file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(source.num_bytes for source in sources.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        write_file(partial / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    return files


def _weights(
    reader: CheckpointReader, manifest: CheckpointManifest, sources: dict[str, _Source]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, source in sources.items():
        (weight,) = _read(reader, manifest, source.name)
        if source.adapter is not None:
            a_RI, b_OR = _read(reader, manifest, *source.adapter)
            assert manifest.lora is not None
            weight = merged(weight, LowRank(a_RI, b_OR, manifest.lora["alpha"] / manifest.lora["rank"]))
        yield name, weight.to(source.dtype)


def _read(reader: CheckpointReader, manifest: CheckpointManifest, *names: str) -> list[torch.Tensor]:
    """Read whole weights."""
    found = {
        name: torch.empty(manifest.weights[name].shape, dtype=_dtype(manifest.weights[name].dtype)) for name in names
    }
    reader.read({"model": found})
    return list(found.values())


def _copy_files(files_from: Path, partial: Path, manifest: CheckpointManifest, sources: dict[str, _Source]) -> None:
    """Copy config and tokenizer; the config then says what is exported."""
    copy_model_files(files_from, partial)
    path = partial / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    dtypes = [source.dtype for source in sources.values() if source.dtype.is_floating_point]
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    if manifest.head == "value":
        config["architectures"] = [
            name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures") or ()
        ]
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    write_file(path, (json.dumps(config, indent=2) + "\n").encode())


def _float_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"--dtype {name} is not known; use float32, bfloat16 or float16")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _sync(path: Path) -> None:
    """Wait until a file that a library wrote is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
