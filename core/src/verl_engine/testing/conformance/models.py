"""The tiny models of the kit, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.testing.tiny_models import (
    write_absolute_position_model,
    write_tiny_critic,
    write_tiny_mixture,
    write_tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path


def write_model(folder: Path, kind: str) -> None:
    """Write a model folder; it appears only when it is whole."""
    partial = folder.with_name(f".{folder.name}")
    if kind == "buffered":
        from verl_engine.testing.buffered_model import write_buffered_model

        write_buffered_model(partial)
    elif kind == "absolute":
        write_absolute_position_model(partial)
    elif kind == "critic":
        write_tiny_critic(partial)
    elif kind == "experts":
        write_tiny_mixture(partial)
    else:
        write_tiny_model(
            partial,
            tied=kind == "tied",
            seed=1 if kind == "other" else 0,
            attention_dropout=0.5 if kind == "dropout" else 0.0,
        )
    partial.rename(folder)
