"""What the doctor says of something that is wrong."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or unusual."""

    severity: Literal["error", "warning"]
    """An error keeps what it concerns from working."""
    subject: str
    """Such as ``backend fsdp2`` or ``OMP_NUM_THREADS``."""
    text: str
    fix: str | None = None
    """A command that fixes it, to be copied."""
    concerns_all: bool = True
    """False where it concerns the plugin alone that `subject` names."""

    def breaks(self, backend: str | None) -> bool:
        """Whether it keeps a backend from working; without one, anything."""
        concerns = backend is None or self.concerns_all or self.subject == f"backend {backend}"
        return self.severity == "error" and concerns
