"""A checkpoint as a Hugging Face folder, on one process and with bounded memory; adapters are merged in."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from verl_engine.contract.errors import ConfigError, PluginImportError, WeightsError
from verl_engine.engine.checkpoints.folder_names import FolderNames
from verl_engine.engine.checkpoints.folders import sync, write_file
from verl_engine.engine.checkpoints.manifest import MODEL_FOLDER, CheckpointManifest, copy_model_files
from verl_engine.engine.checkpoints.reader import CheckpointReader
from verl_engine.engine.weights.held_dtypes import cast_dtype
from verl_engine.engine.weights.model_files import CONFIG, ModelFiles, saved_config
from verl_engine.engine.weights.model_folder import main_dtype
from verl_engine.engine.weights.module_weights import LowRank, merged

SHARD_BYTES: Final = 2 * 1024**3
_BASE: Final = ".base_layer."
_FLOATS: Final = ("float32", "bfloat16", "float16")


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

    Memory is that of one file of weights and the largest weight; of experts, which folders hold one by one, that of two
    files. The folder appears when it is whole.
    Args:
        folder: a whole checkpoint.
        output: does not exist yet.
        dtype: of floating-point weights, but for what transformers keeps in float32; by default as in the checkpoint.
        model_folder: takes the place of the config and tokenizer files that the checkpoint remembers.
        shard_bytes: largest size of a file of weights, but for a single weight that is larger.
        on_shard: told which file is being written, from 1, and how many there are.
    Raises:
        ConfigError: `output` exists, or there is no config that can be read.
        WeightsError: the checkpoint is not whole, or damaged, or `output` cannot be written.
    """
    if os.path.lexists(output):
        raise ConfigError(f"--output {output} exists already; give a new folder, or remove it first")
    manifest = CheckpointManifest.read(folder)
    manifest.require_intact(folder, num_threads=os.cpu_count() or 1)
    files_from = model_folder or folder / MODEL_FOLDER
    if not (files_from / "config.json").is_file():
        raise ConfigError(
            f"{files_from} holds no config.json; give the model folder that the run began with: --model MODEL_FOLDER"
        )
    if dtype not in (None, *_FLOATS):  # narrower ones need scales beside the weights
        raise ConfigError(f"--dtype {dtype} cannot be exported; use {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}")
    target = None if dtype is None else _dtype(dtype)
    names = FolderNames(files_from, manifest.head)
    sources = _sources(manifest, target, names.held_dtypes(target))
    reader = CheckpointReader(folder)
    with _hidden_until_whole(output) as partial:
        copy_model_files(files_from, partial, None if model_folder else manifest.model_files(folder))
        _adapt_config(files_from, partial, manifest, sources)
        groups = names.together({name: manifest.weights[source.name].shape for name, source in sources.items()})
        shards = _divide(groups, sources, shard_bytes)
        files = _write_shards(reader, manifest, sources, shards, names, partial, on_shard)
    num_weights = len({name for held in files.values() for name in held})
    return Exported(output, num_weights, sum(source.num_bytes for source in sources.values()), tuple(files))


@contextmanager
def _hidden_until_whole(output: Path) -> Iterator[Path]:
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)  # never an existing one: it may be in use
        try:
            yield partial
            sync(partial)
            partial.rename(output)
        finally:  # where the disk is full, others need the room
            shutil.rmtree(partial, ignore_errors=True)
        sync(output.parent)
    except OSError as error:
        raise WeightsError(f"the export to {output} failed, nothing is there: {error}") from error


def _sources(
    manifest: CheckpointManifest, dtype: torch.dtype | None, held: Mapping[str, torch.dtype]
) -> dict[str, _Source]:
    """Map exported names to what they are made of; names of adapted layers become plain ones."""
    found = {}
    for name, weight in manifest.weights.items():
        layer, is_adapter, _ = name.partition(".lora_")
        if is_adapter:
            continue
        layer, is_base, rest = name.partition(_BASE)
        adapter = _adapter_of(layer, manifest) if is_base and rest == "weight" else None
        plain = name.replace(_BASE, ".")
        target = cast_dtype(plain, _dtype(weight.dtype), dtype, held)
        found[plain] = _Source(name, adapter, target, target.itemsize * torch.Size(weight.shape).numel())
    return found


def _adapter_of(layer: str, manifest: CheckpointManifest) -> tuple[str, str]:
    """Return the names of A and B beside a layer; a WeightsError where there are others, or no scale is known."""
    first, second = (
        [name for name in manifest.weights if name.startswith(f"{layer}.lora_{which}.")] for which in ("A", "B")
    )
    if len(first) != 1 or len(second) != 1 or manifest.lora is None:
        raise WeightsError(
            f"the adapter of {layer} cannot be merged: it needs one A, one B and the manifest's lora, and has "
            f"{first}, {second} and {manifest.lora}"
        )
    return first[0], second[0]


def _divide(groups: list[list[str]], sources: dict[str, _Source], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    size = shard_bytes + 1
    for group in groups:
        num_bytes = sum(sources[name].num_bytes for name in group)
        if size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1] += group
        size += num_bytes
    return shards


def _write_shards(
    reader: CheckpointReader,
    manifest: CheckpointManifest,
    sources: dict[str, _Source],
    shards: list[list[str]],
    names: FolderNames,
    partial: Path,
    on_shard: Callable[[int, int], None] | None,
) -> dict[str, list[str]]:
    try:
        from safetensors import SafetensorError  # only exports need it
        from safetensors.torch import save_file
    except ImportError as error:
        raise PluginImportError(
            f"an export needs safetensors ({error}); install it: pip install safetensors"
        ) from error
    files: dict[str, list[str]] = {}
    for number, chosen in enumerate(shards, 1):
        if on_shard is not None:
            on_shard(number, len(shards))
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = names.translated(dict(_weights(reader, manifest, {name: sources[name] for name in chosen})))
        try:
            save_file(weights, partial / file, {"format": "pt"})
        except SafetensorError as error:  # it hides an OSError, such as a full disk
            raise OSError(str(error)) from error
        sync(partial / file)
        files[file] = list(weights)
        del weights  # before the next file takes as much
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(source.num_bytes for source in sources.values())},
            "weight_map": {name: file for file, held in files.items() for name in held},
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
            weight = merged(weight, LowRank(a_RI, b_OR, manifest.lora.alpha / manifest.lora.rank))
        yield name, weight.to(source.dtype)


def _read(reader: CheckpointReader, manifest: CheckpointManifest, *names: str) -> list[torch.Tensor]:
    found = {
        name: torch.empty(manifest.weights[name].shape, dtype=_dtype(manifest.weights[name].dtype)) for name in names
    }
    reader.read({"model": found})
    return list(found.values())


def _adapt_config(files_from: Path, partial: Path, manifest: CheckpointManifest, sources: dict[str, _Source]) -> None:
    found = ModelFiles.read(files_from).config()
    if found is None:
        raise ConfigError(f"{files_from / CONFIG} holds no JSON object")
    is_critic = manifest.head == "value"
    architectures = found.get("architectures") or ()
    if is_critic:
        architectures = [name.replace("ForCausalLM", "ForTokenClassification") for name in architectures]
    dtype = main_dtype(source.dtype for source in sources.values())
    config = saved_config(found, dtype, architectures, is_critic=is_critic)
    write_file(partial / CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightsError(f"the checkpoint's weights have dtype {name}, which this torch {torch.__version__} lacks")
    return found
