"""Make the addition task: prompts, held-out prompts, supervised examples and a tiny untrained model.

    python examples/addition_data.py FOLDER [--seed SEED]

The task is to add two numbers of two digits; the answer is written with its digits reversed, since that way each digit
depends only on what is already written: ``47+85=`` is answered by ``231``. Files, in the columns of verl:

    FOLDER/train.parquet   prompts with their answers, for `verl-engine train`
    FOLDER/eval.jsonl      held-out prompts, which no other file holds
    FOLDER/sft.parquet     the training prompts as prompt and response, for `verl-engine sft`
    FOLDER/calls.parquet   the same prompts with a call of the calculator as response, for examples/calculator_sft.yaml
    FOLDER/model           a Qwen3 of 0.4 million parameters with random weights, and a tokenizer of single characters
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_DIGITS = 2
NUM_HELD_OUT = 512
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="


def main() -> None:
    """Write everything into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the addition task and a tiny untrained model.")
    parser.add_argument("folder", type=Path, help="where to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the model's random weights")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split_sums(arguments.seed)
    pq.write_table(pa.Table.from_pylist([prompt_row(a, b) for a, b in train]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist([example_row(a, b) for a, b in train]), folder / "sft.parquet")
    pq.write_table(pa.Table.from_pylist([call_row(a, b) for a, b in train]), folder / "calls.parquet")
    lines = (json.dumps(prompt_row(a, b)) for a, b in held_out)
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_model(folder / "model", arguments.seed)
    print(f"{folder}: {len(train)} training prompts, {len(held_out)} held-out prompts, an untrained model")


def split_sums(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all pairs of numbers, shuffled: those to train on, and those held out."""
    limit = 10**NUM_DIGITS
    pairs = [(a, b) for a in range(limit) for b in range(limit)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def question(a: int, b: int) -> str:
    """Return a sum as the model sees it, such as ``07+85=``."""
    return f"{a:0{NUM_DIGITS}d}+{b:0{NUM_DIGITS}d}="


def answer(a: int, b: int) -> str:
    """Return the digits of the sum, last one first."""
    return str(a + b)[::-1]


def prompt_row(a: int, b: int) -> dict[str, Any]:
    """Return a prompt in verl's columns."""
    return {
        "data_source": "addition",
        "prompt": question(a, b),
        "reward_model": {"style": "rule", "ground_truth": answer(a, b)},
        "extra_info": {"a": a, "b": b},
    }


def example_row(a: int, b: int) -> dict[str, str]:
    """Return a supervised example."""
    return {"prompt": question(a, b), "response": answer(a, b)}


def call_row(a: int, b: int) -> dict[str, str]:
    """Return a supervised example of a call: the sum once more, and what the calculator writes behind it."""
    return {"prompt": question(a, b), "response": f"{question(a, b)}{a + b}"}


def save_model(folder: Path, seed: int) -> None:
    """Write a Hugging Face model folder: random weights and a tokenizer whose tokens are single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the model is written in no time
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    pad, bos, eos, unknown = SPECIAL_TOKENS
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        bos_token_id=vocabulary[bos],
        eos_token_id=vocabulary[eos],
        pad_token_id=vocabulary[pad],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
