"""The arguments that `train` and `sft` share, as typer annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Recipe: TypeAlias = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the job.")]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that win over the recipe, by dotted key: `engine.learning_rate=1e-4 trainer.num_steps=10`. "
        "The value is YAML, so `null`, `true` and `[0.9, 0.95]` work.",
        show_default=False,
    ),
]
Output: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="New folder for the results: config.yaml, metrics.jsonl, tensorboard/, summary.json, report.html and "
        "model/, the trained weights as a Hugging Face folder. Only a dry run may leave it out.",
        show_default=False,
    ),
]
Overwrite: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the results of an earlier job in DIR; other files are never deleted.",
    ),
]
DryRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything (settings, files, the reward function, ports, memory), print the job with all defaults "
        "filled in, and start nothing. Needs no GPU and no torch.",
    ),
]
