"""Saying something to a user who may have gone: a closed terminal or pipe ends nothing."""

from __future__ import annotations

from contextlib import suppress

import typer

from verl_engine.contract.errors import EngineError


def say(text: str) -> None:
    """Print a line on standard output, if anybody reads it."""
    with suppress(OSError, ValueError):
        typer.echo(text)


def warn(text: str) -> None:
    """Print a warning on standard error, if anybody reads it."""
    with suppress(OSError, ValueError):
        typer.secho(f"warning: {text}", err=True, fg="yellow")


def describe(error: BaseException) -> str:
    """Return an error's message; with its class where it is none of ours."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
