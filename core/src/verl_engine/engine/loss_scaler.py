"""The dynamic loss scale of float16: gradients too small for its range are lifted into it."""

from typing import Any, Final

START: Final = 2.0**16
LEAST: Final = 1.0
MOST: Final = 2.0**24
GROWTH_INTERVAL: Final = 2000


class LossScaler:
    """A factor on the loss, and so on the gradient: halved when one overflows, doubled after a long time without.

    float16 has nothing below 6e-8, where many gradients lie, and nothing above 65504. The factor is a power of two, so
    that multiplying by it and dividing by it again rounds nothing.

    Not ``torch.amp.GradScaler``: that decides on each rank by the gradients of that rank alone, so ranks with shards
    would skip different steps, and it reads every gradient once more for it. Here the decision is that of the global
    gradient norm, which is computed anyway and is equal on all ranks.
    """

    def __init__(self) -> None:
        self.scale = START
        self._finite_in_a_row = 0

    def update(self, *, is_finite: bool) -> bool:
        """Note whether the global gradient norm was finite, and return whether the scale was lowered.

        If so, the next step may well be finite. All ranks note the same.
        """
        if not is_finite:
            self._finite_in_a_row = 0
            lowered = max(self.scale / 2, LEAST)
            is_lower = lowered < self.scale
            self.scale = lowered
            return is_lower
        self._finite_in_a_row += 1
        if self._finite_in_a_row == GROWTH_INTERVAL:
            self._finite_in_a_row = 0
            self.scale = min(self.scale * 2, MOST)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state."""
        self.scale = float(state["scale"])
        self._finite_in_a_row = int(state["finite_in_a_row"])
