"""Check a finished job: every loss is finite, and transformers loads the saved weights.

python examples/chain_sum_check.py OUTPUT
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def main() -> None:
    """Check the output folder that the command line names."""
    parser = argparse.ArgumentParser(description="Check a finished job's losses and weights.")
    parser.add_argument("output", type=Path, help="the --output folder of `verl-engine train`")
    output: Path = parser.parse_args().output
    losses = read_losses(output / "metrics.jsonl")
    if not losses or not all(math.isfinite(loss) for loss in losses):
        raise SystemExit(f"{output}: expected finite losses, got {losses}")
    print(f"losses: {losses}")
    print(f"after reloading, the model says: {ask(output / 'model', 'What is 2 + 3?')!r}")


def read_losses(path: Path) -> list[float]:
    """Return the loss of each training step; one that was not finite is written as null."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = [record.get("loss") for record in records if record["kind"] == "step"]
    return [math.nan if loss is None else float(loss) for loss in losses]


def ask(folder: Path, question: str) -> str:
    """Load the model folder and let it answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Any: transformers annotates what these return for other ways to call them.
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
