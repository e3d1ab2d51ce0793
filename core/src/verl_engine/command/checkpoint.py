"""``verl-engine checkpoint``: what checkpoints there are, and one as a Hugging Face folder."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_engine.contract.errors import ConfigError, PluginImportError, WeightsError
from verl_engine.engine.checkpoints.folders import MANIFEST, folder_bytes, step_folder, whole_steps
from verl_engine.engine.checkpoints.manifest import CheckpointManifest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at checkpoints, and make a Hugging Face folder of one.",
)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of checkpoints, or one of them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Only see that all files are there.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list, or one object with all weights.")
    ] = False,
) -> int:
    """Show each whole checkpoint of a folder: step, age, size, ranks, engine and what can be resumed from it.

    Of a single one show all that it says of itself. Every file is read and compared with its checksum, at the disk's
    speed. No torch is imported. The exit status is 1 if one of them is damaged.

    **Examples**

    `verl-engine checkpoint inspect outputs/run/checkpoints`

    `verl-engine checkpoint inspect outputs/run/checkpoints/step-00000200`

    `verl-engine checkpoint inspect outputs/run/checkpoints --json | jq '.[-1].step'`
    """
    if (folder / MANIFEST).is_file():
        manifest = _checked(folder, quick)
        if as_json:
            weights = manifest.model_dump(mode="json", include={"weights"})
            _print_json({**_summary(folder, manifest), **weights})
        else:
            compared = "not compared" if quick else "all right"
            _print_one(folder, manifest, f"of {len(manifest.files)} files, {compared}")
        return 0
    folders = [step_folder(folder, step) for step in _steps(folder)]
    rows = [(each, *_read(each, quick)) for each in folders]
    if as_json:
        _print_json(
            [
                {"path": str(each), "error": problem} if manifest is None else _summary(each, manifest)
                for each, manifest, problem in rows
            ]
        )
    else:
        _print_table(folder, rows)
    return 1 if any(problem for _, _, problem in rows) else 0


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of them: the newest.")],
    output: Annotated[Path, typer.Option(metavar="HF_FOLDER", help="What to write; must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16; by default as in the checkpoint.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL_FOLDER", help="Config and tokenizer from here, not from the checkpoint."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is done.")] = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, which appears when it is whole.

    Adapters (LoRA) are merged in, tied weights are written once, experts one by one, as other tools read them. It takes
    the memory of 2 GiB of weights (4 with experts), whatever the size of the model, and no accelerator.

    **Examples**

    `verl-engine checkpoint export outputs/run/checkpoints --output my_model`

    `verl-engine checkpoint export outputs/run/checkpoints/step-00000200 --output my_model --dtype bfloat16`
    """
    source = folder if (folder / MANIFEST).is_file() else step_folder(folder, _steps(folder)[-1])
    if model is not None and not model.is_dir():
        raise ConfigError(f"--model {model} is no folder")
    try:
        from verl_engine.engine.checkpoints.export import export_checkpoint  # imports torch
    except ImportError as error:
        raise PluginImportError(f"an export needs torch, which cannot be imported: {error}") from error

    def tell(number: int, total: int) -> None:
        sys.stderr.write(f"writing weights, file {number} of {total}\n")

    done = export_checkpoint(source, output, dtype=dtype, model_folder=model, on_shard=tell)
    if as_json:
        _print_json({**dataclasses.asdict(done), "folder": str(done.folder), "checkpoint": str(source)})
    else:
        sys.stdout.write(f"{done.num_weights} weights, {_size(done.num_bytes)}, of {source} are in {done.folder}\n")


def _steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder; a WeightsError that says what is there instead of any."""
    if not folder.is_dir():
        raise WeightsError(
            f"{folder} {'is a file' if folder.exists() else 'does not exist'}; give a folder of checkpoints"
        )
    steps = whole_steps(folder)
    if steps:
        return steps
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for name in inside:
        if whole_steps(folder / name):
            raise WeightsError(f"{folder} holds no checkpoint itself, but {folder / name} does; give that")
    about = "has no folder in it" if not inside else f"has the folders {', '.join(inside[:5])}, none of which holds one"
    if "model" in inside:
        about = f"is a job's folder, with the trained model in {folder / 'model'}, and holds no checkpoint"
    raise WeightsError(
        f"{folder} {about}; give a folder that CheckpointStore saves in, or one step-NUMBER of it that is whole"
    )


def _checked(folder: Path, is_quick: bool) -> CheckpointManifest:
    manifest = CheckpointManifest.read(folder)
    manifest.require_intact(folder, num_threads=os.cpu_count() or 1, is_quick=is_quick)
    return manifest


def _read(folder: Path, is_quick: bool) -> tuple[CheckpointManifest | None, str]:
    try:
        return _checked(folder, is_quick), ""
    except WeightsError as error:
        return None, str(error)


def _summary(folder: Path, manifest: CheckpointManifest) -> dict[str, Any]:
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
    summary = {
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
    for name, value in summary.items():
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
