"""How large the tensors are that some code makes: shows that something is computed in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable


class LargestTensor(TorchDispatchMode):
    """Inside it, notes the largest tensor that an operation gives, forward and backward; views count as they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0
        """Numbers that it holds."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; torch calls it."""
        del types
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numel = max(self.numel, found.numel())
        return found
