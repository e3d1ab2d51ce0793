"""Saying something to a user who may have gone: a closed terminal or pipe ends nothing."""

from __future__ import annotations

import sys

import typer

from verl_engine.command.streams import silence
from verl_engine.contract.errors import EngineError


def say(text: str) -> None:
    """Print a line on standard output, if anybody reads it."""
    try:
        typer.echo(text)
    except (OSError, ValueError):
        silence(sys.stdout)


def warn(text: str) -> None:
    """Print a warning on standard error, if anybody reads it."""
    try:
        typer.secho(f"warning: {text}", err=True, fg="yellow")
    except (OSError, ValueError):
        silence(sys.stderr)


def describe(error: BaseException) -> str:
    """Return an error's message; with its class where it is none of ours."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
