"""``verl-engine checkpoint``: what checkpoints there are, and one as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_engine.command.parser import command_parser
from verl_engine.contract.errors import ConfigError, PluginImportError, WeightsError
from verl_engine.engine.checkpoints.folders import MANIFEST, folder_bytes, step_folder, whole_steps
from verl_engine.engine.checkpoints.manifest import CheckpointManifest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DESCRIPTION = """\
Look at checkpoints, and make a Hugging Face folder of one.

  inspect   what is in a folder of checkpoints, or in one of them, and whether it is what was saved
  export    config, tokenizer and weights of one, for transformers and rollout engines"""

EXAMPLES = """\
examples:
  verl-engine checkpoint inspect outputs/run/checkpoints
  verl-engine checkpoint export outputs/run/checkpoints --output my_model --dtype bfloat16

`verl-engine checkpoint inspect --help` and `... export --help` say more."""

INSPECT = """\
Show each whole checkpoint of a folder: step, age, size, ranks, engine and what can be resumed from it.
Of a single one show all that it says of itself. Every file is read and compared with its checksum, at the
disk's speed; --quick leaves that out. No torch is imported. The exit code is 1 if one of them is damaged."""

INSPECT_EXAMPLES = """\
examples:
  verl-engine checkpoint inspect outputs/run/checkpoints                  a table, oldest first
  verl-engine checkpoint inspect outputs/run/checkpoints/step-00000200    one of them
  verl-engine checkpoint inspect outputs/run/checkpoints --json | jq '.[-1].step'"""

EXPORT = """\
Write the weights of a checkpoint as a Hugging Face folder, which appears when it is whole.

Adapters (LoRA) are merged in, tied weights are written once, experts one by one, as other tools read them.
It takes the memory of 2 GiB of weights (4 with experts), whatever the size of the model, and no accelerator."""

EXPORT_EXAMPLES = """\
examples:
  verl-engine checkpoint export outputs/run/checkpoints --output my_model                      the newest
  verl-engine checkpoint export outputs/run/checkpoints/step-00000200 --output my_model --dtype bfloat16"""


def run(arguments: Sequence[str], program: str) -> int:
    """Inspect or export.

    Args:
        arguments: those after ``checkpoint``.
        program: for usage lines.
    Returns:
        The exit code.
    Raises:
        WeightsError: there is no whole checkpoint, or it cannot be read.
        ConfigError: an argument does not fit.
        PluginImportError: what an export needs is not installed.
    """
    actions = {"inspect": _inspect, "export": _export}
    if arguments and arguments[0] in actions:
        return actions[arguments[0]](arguments[1:], f"{program} {arguments[0]}")
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("action", choices=list(actions), metavar="{inspect,export}", help="what to do")
    parser.parse_args(arguments)  # prints help, or what is wrong
    return 0


def _inspect(arguments: Sequence[str], program: str) -> int:
    parser = command_parser(program, INSPECT, INSPECT_EXAMPLES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="of checkpoints, or one of them")
    parser.add_argument("--quick", action="store_true", help="compare no content: only see that all files are there")
    parser.add_argument("--json", action="store_true", help="print JSON: a list, or one object with all weights")
    options = parser.parse_args(arguments)
    if (options.folder / MANIFEST).is_file():
        manifest = _checked(options.folder, options)
        if options.json:
            weights = manifest.model_dump(mode="json", include={"weights"})
            _print_json({**_figures(options.folder, manifest), **weights})
        else:
            compared = "not compared" if options.quick else "all right"
            _print_one(options.folder, manifest, f"of {len(manifest.files)} files, {compared}")
        return 0
    folders = [step_folder(options.folder, step) for step in whole_steps(options.folder)]
    if not folders:
        raise WeightsError(
            f"{options.folder} holds no whole checkpoint; give a folder that CheckpointStore saves them in, or one "
            "step-NUMBER of it"
        )
    rows = [(folder, *_read(folder, options)) for folder in folders]
    if options.json:
        _print_json(
            [
                {"path": str(folder), "error": problem} if manifest is None else _figures(folder, manifest)
                for folder, manifest, problem in rows
            ]
        )
    else:
        _print_table(options.folder, rows)
    return 1 if any(problem for _, _, problem in rows) else 0


def _export(arguments: Sequence[str], program: str) -> int:
    parser = command_parser(program, EXPORT, EXPORT_EXAMPLES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a checkpoint, or a folder of them: the newest")
    parser.add_argument("--output", metavar="HF_FOLDER", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16, float16; by default as in the checkpoint")
    parser.add_argument(
        "--model", metavar="MODEL_FOLDER", type=Path, help="config and tokenizer from here, not from the checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when it is done")
    options = parser.parse_args(arguments)
    folder = options.folder
    if not (folder / MANIFEST).is_file():
        steps = whole_steps(folder)
        if not steps:
            raise WeightsError(f"{folder} is no checkpoint, and holds no whole one")
        folder = step_folder(folder, steps[-1])
    if options.model is not None and not options.model.is_dir():
        raise ConfigError(f"--model {options.model} is no folder")
    return _write(folder, options)


def _write(folder: Path, options: argparse.Namespace) -> int:
    try:
        from verl_engine.engine.checkpoints.export import export_checkpoint  # imports torch
    except ImportError as error:
        raise PluginImportError(f"an export needs torch, which cannot be imported: {error}") from error

    def tell(number: int, total: int) -> None:
        sys.stderr.write(f"writing weights, file {number} of {total}\n")

    done = export_checkpoint(folder, options.output, dtype=options.dtype, model_folder=options.model, on_shard=tell)
    if options.json:
        _print_json({**dataclasses.asdict(done), "folder": str(done.folder), "checkpoint": str(folder)})
    else:
        sys.stdout.write(f"{done.num_weights} weights, {_size(done.num_bytes)}, of {folder} are in {done.folder}\n")
    return 0


def _checked(folder: Path, options: argparse.Namespace) -> CheckpointManifest:
    manifest = CheckpointManifest.read(folder)
    manifest.require_intact(folder, num_threads=os.cpu_count() or 1, is_quick=options.quick)
    return manifest


def _read(folder: Path, options: argparse.Namespace) -> tuple[CheckpointManifest | None, str]:
    try:
        return _checked(folder, options), ""
    except WeightsError as error:
        return None, str(error)


def _figures(folder: Path, manifest: CheckpointManifest) -> dict[str, Any]:
    fields = manifest.model_dump(mode="json", exclude={"weights", "files"})
    return {
        "path": str(folder),
        "bytes": folder_bytes(folder),
        "age_s": round(time.time() - manifest.saved_at),
        "num_weights": len(manifest.weights),
        **fields,
    }


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _print_table(root: Path, rows: list[tuple[Path, CheckpointManifest | None, str]]) -> None:
    from rich.console import Console  # slow to import; --json does without
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    table = Table(title=f"Checkpoints in {root}", title_justify="left", header_style="bold")
    for heading in ("step", "age", "size", "ranks", "backend", "holds"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("step", "age", "size") else "left")
    for folder, manifest, problem in rows:
        if manifest is None:
            table.add_row(Text(folder.name), "", _size(folder_bytes(folder)), "", "", Text(problem, style="red"))
            continue
        cells = (
            str(manifest.step),
            _age(time.time() - manifest.saved_at),
            _size(folder_bytes(folder)),
            str(manifest.world_size),
            manifest.backend,
            ", ".join(manifest.contents),
        )
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table)


def _print_one(folder: Path, manifest: CheckpointManifest, checksums: str) -> None:
    from rich.console import Console  # as above
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    table = Table(show_header=False, box=None)
    dtypes = sorted({weight.dtype for weight in manifest.weights.values()})
    figures = {
        "step": manifest.step,
        "saved": f"{_age(time.time() - manifest.saved_at)} ago",
        "size": _size(folder_bytes(folder)),
        "backend": f"{manifest.backend} ({manifest.distribution or 'distribution not known'})",
        "ranks": manifest.world_size,
        "holds": ", ".join(manifest.contents),
        "weights": f"{len(manifest.weights)} ({', '.join(dtypes)})",
        "head": manifest.head,
        "adapters": ", ".join(f"{name} {value:g}" for name, value in (manifest.lora or ())) or "none",
        "checksums": checksums,
        "user state": json.dumps(manifest.user_state),
    }
    for name, value in figures.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    Console(highlight=False).print(table)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:  # noqa: PLR2004 - to the next unit
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
