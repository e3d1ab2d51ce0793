"""Writes what a job reads: a backend, a model folder, data files and a recipe. All small, none needs torch."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BACKEND = """
from typing import Literal

from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.markers import hookimpl


class ToyConfig(EngineConfig):
    backend: Literal["toy"] = "toy"
    most_ranks: int = 4
    ranks_per_replica: int = 1

    def data_parallel_ranks(self, world_size):
        return tuple(rank // self.ranks_per_replica for rank in range(world_size))

    def validate_world(self, world_size):
        if world_size > self.most_ranks:
            raise ConfigError(f"engine.most_ranks={self.most_ranks} is below the number of ranks, {world_size}")


SPEC = BackendSpec(
    name="toy",
    config_class=ToyConfig,
    devices=("cpu",),
    capabilities=Capabilities(gaps={"snapshots": "a toy", "lora": "a toy"}),
    plugin_api_version=2,
)


@hookimpl
def engine_create(config, model_folder, role): ...


@hookimpl
def engine_gradient_sync(engine, is_last_micro_batch): ...


@hookimpl
def engine_optimizer_step(engine): ...
"""


def write_backend(folder: Path) -> Path:
    """Write an installed distribution with the backend ``toy``; put `folder` on the path to have it."""
    metadata = folder / "toy_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl_engine.backends]\ntoy = toy_engine_hooks\n")
    (folder / "toy_engine_hooks.py").write_text(BACKEND)
    return folder


def write_safetensors(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write float32 zeros in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def write_model(folder: Path) -> Path:
    """Write a model folder with 12 + 2 weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"embedding": [3, 4], "norm": [2]})
    return folder


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_prompts(file: Path, number: int = 4) -> Path:
    """Write sums as prompts."""
    return write_lines(
        file,
        [
            {"data_source": "sums", "prompt": f"{index}+1=", "reward_model": {"ground_truth": str(index + 1)}}
            for index in range(number)
        ],
    )


def train_settings(folder: Path) -> dict[str, Any]:
    """Write all that a small RL job reads, and return its recipe's content."""
    return {
        "model": {"path": str(write_model(folder / "model"))},
        "engine": {"backend": "toy", "learning_rate": 1e-4},
        "data": {"prompts": str(write_prompts(folder / "prompts.jsonl"))},
        "trainer": {"num_steps": 3, "mini_batch_size": 2},
        "evaluation": {"sets": {"sums": {"prompts": str(write_prompts(folder / "held_out.jsonl"))}}},
    }


def sft_settings(folder: Path) -> dict[str, Any]:
    """Write all that a small supervised job reads, and return its recipe's content."""
    examples = [{"prompt": f"{index}+1=", "response": str(index + 1)} for index in range(4)]
    return {
        "model": {"path": str(write_model(folder / "model"))},
        "engine": {"backend": "toy", "learning_rate": 1e-4},
        "data": {"examples": str(write_lines(folder / "examples.jsonl", examples))},
        "trainer": {"num_steps": 5, "batch_size": 4},
    }


def write_recipe(file: Path, settings: Mapping[str, Any]) -> Path:
    """Write a recipe."""
    file.write_text(yaml.safe_dump(dict(settings)))
    return file
