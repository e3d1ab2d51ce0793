"""The engine of fsdp2, for mutants to be derived from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from verl_fsdp.engine import ShardedEngine
from verl_fsdp.fsdp2.build import build

if TYPE_CHECKING:
    from pathlib import Path

    from verl_fsdp.config import Fsdp2Config


class Fsdp2Engine(ShardedEngine):
    """What the recipe of fsdp2 makes."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        """Follow the recipe, but for the class of what it makes."""
        with mock.patch("verl_fsdp.fsdp2.build.ShardedEngine", cls):
            return build(config, model_folder)
