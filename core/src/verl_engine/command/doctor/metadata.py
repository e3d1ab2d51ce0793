"""Installed distributions whose metadata cannot be read: they break what reads all of them, as torch does."""

from importlib.metadata import Distribution, distributions

from verl_engine.command.doctor.findings import Finding
from verl_engine.host.install_hints import pip_install


def unreadable_metadata() -> list[Finding]:
    """Read the entry points of every distribution, as an import of torch does."""
    problems = ((distribution.metadata["Name"], _problem(distribution)) for distribution in distributions())
    return [
        Finding(
            "error",
            name or "a distribution without a name",
            f"its entry points cannot be read ({problem}); importing torch reads those of everything installed, and "
            "fails",
            pip_install("--force-reinstall", "--no-deps", name) if name else None,
        )
        for name, problem in problems
        if problem
    ]


def _problem(distribution: Distribution) -> str:
    try:
        list(distribution.entry_points)
    except Exception as error:  # noqa: BLE001 - broken files raise anything
        return f"{type(error).__name__}: {error}"
    return ""
