"""Patterns for names of modules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch


def module_name_match(pattern: str, name: str) -> bool:
    """Whether a pattern fits: ``{*}`` digits, ``{a-b}`` a range, ``*`` anything."""
    ranges: list[tuple[int, int] | None] = []
    expression = ""
    for piece in re.split(r"(\{[^}]*\})", pattern):
        if piece.startswith("{"):
            low, dash, high = piece[1:-1].partition("-")
            ranges.append((int(low), int(high)) if dash else None)
            expression += r"(\d+)"
        else:
            expression += ".*".join(re.escape(part) for part in piece.split("*"))
    found = re.fullmatch(expression, name)
    return found is not None and all(
        limits is None or limits[0] <= int(number) <= limits[1]
        for number, limits in zip(found.groups(), ranges, strict=True)
    )


def matching(model: torch.nn.Module, patterns: Iterable[str], what: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that any pattern fits; only where none fits at all is that an error."""
    wanted = list(patterns)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if any(module_name_match(pattern, name) for pattern in wanted)
    ]
    if not found:
        raise RuntimeError(f"[{what}] No module named {wanted}.")
    yield from found
