"""Write docs/reference/models.md from what the zoo found.

    python -m nox -s zoo -- --output docs/reference/models.json
    python docs/generate_model_reference.py

A test fails while the page differs from the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parent / "reference" / "models.md"
RESULTS: Final = PAGE.with_suffix(".json")
COLUMNS: Final = ("packed", "padded", "saved", "lora", "rollout", "sync")
CELLS: Final = {
    "right": "yes",
    "right in rows": "in rows",
    "right mixed lengths": "in batches",
    "right equal lengths": "by length",
    "right anew": "slow",
    "refused": "refused",
}
INTRODUCTION: Final = """\
# Which models are right

<!-- Written by docs/generate_model_reference.py from models.json, which the session `zoo` writes: change neither. -->

A model is any causal language model of transformers in a local folder. The session `zoo` makes a tiny random model of
every architecture that the installed transformers can build from a config, and compares what we compute with
transformers' own model, eager and sequence by sequence: {architectures} architectures, {right} right in everything,
{refused} refused in something, {wrong} wrong. What cannot be computed right is refused when the engine is built.

- `packed`: log-probs and gradients with `engine.packing=true` of fsdp2; fsdp and fsdp_turbo run the same code.
  *in rows*: the model cannot be packed, so the engine gives each sequence a row of its own, and the log says why.
- `padded`: log-probs and gradients with `engine.packing=false`.
- `saved`: a model saved untrained equals its source, bit for bit, for transformers.
- `lora`: with untrained adapters on all linear layers, log-probs and the saved model are those of the source.
- `rollout`: the embedded engine, prompts of mixed lengths: each token's log-prob is that of a whole forward.
  *in batches*: requests cannot join a running batch; it is generated to its end before the next begins.
  *by length*: so too, and only prompts of one length share a batch, for padding would change the others.
  *slow*: no state is kept between tokens, so that each token costs a forward of all before it.
- `sync`: untrained weights, sent in bfloat16 to a rollout engine in bfloat16, leave it as it was.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """Return the whole page."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, checks in sorted(found["checks"].items()):
        lines.append(f"| `{name}` | {' | '.join(CELLS[checks[column]] for column in COLUMNS)} |")
    reasons = [
        f"- `{name}` ({', '.join(checks)}): {next(iter(checks.values()))}"
        for name, checks in sorted(found["reasons"]["refused"].items())
    ]
    return INTRODUCTION.format(**found) + "\n".join([*lines, "", "## What is refused, and why", "", *reasons]) + "\n"


if __name__ == "__main__":
    main()
