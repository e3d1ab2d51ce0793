"""Which release is played: names, divided by commas, of what releases differ in."""

import os
from typing import Final

NEWEST: Final = "reset_parallel_state,function_patches,data_mesh"

HAS: Final = frozenset(os.environ.get("FAKE_FSDP_TURBO_HAS", NEWEST).split(","))
"""``expert_dtype`` is none of the newest: there experts are always computed in bfloat16."""
