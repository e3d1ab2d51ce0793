"""How MindSpeed patches Megatron: a part of the ``engine`` section that nothing but its adaptor reads."""

from __future__ import annotations

from verl_engine.contract.strict_model import StrictModel


class MindSpeedConfig(StrictModel):
    """See the fields."""
