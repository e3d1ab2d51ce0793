"""Types of numbers for config fields: whatever counts is a length at last, and a float ends in a tensor of float32."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field

_SMALLEST, _LARGEST = 1e-37, 1e37


def _fits_float32(value: float) -> float:
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise ValueError(f"must be between {_SMALLEST:g} and {_LARGEST:g}, which float32 can hold")
    return value


LARGEST_COUNT: Final = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
"""Tokens, rows, steps."""
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""The same, or none."""
Ranks = Annotated[int, Field(ge=1, le=2**16)]
"""Processes and what is divided among them; also other things that all exist at once."""
Threads = Annotated[int, Field(ge=1, le=1024)]
"""Of one process."""
Bytes = Annotated[int, Field(ge=1, le=2**50)]
"""Of memory; up to a pebibyte."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What every generator of random numbers takes."""
Positive = Annotated[float, Field(gt=0), AfterValidator(_fits_float32)]
"""A number above zero."""
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_fits_float32)]
"""A number from zero on."""


def divisors(number: int) -> str:
    """List what divides a number, for messages."""
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
