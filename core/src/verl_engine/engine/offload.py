"""Parts of an engine on the CPU, in pinned memory, so that others can use its device meanwhile; and back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.device import Device
from verl_engine.engine.weights.engine_weights import EngineWeights, map_local

PARTS: Final = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """Where a gradient is kept: an attribute of something, None where there is no gradient."""

    holder: Any
    attribute: str = "grad"

    def get(self) -> torch.Tensor | None:
        """Look."""
        gradient: torch.Tensor | None = getattr(self.holder, self.attribute)
        return gradient

    def set(self, gradient: torch.Tensor | None) -> None:
        """Put one in, or None."""
        setattr(self.holder, self.attribute, gradient)

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether it can be put there: torch refuses a gradient on another device than its tensor's."""
        return self.attribute != "grad" or self.holder.device == gradient.device


class Offload:
    """Which parts of one engine are on the CPU. While any is, what needs it is refused.

    A gradient whose parameter is on another device is held here, until both are together again.
    """

    def __init__(self, weights: EngineWeights, optimizer: torch.optim.Optimizer | None, device: Device) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._away: set[str] = set()
        self._aside: list[tuple[GradientSlot, torch.Tensor]] = []
        self._guards: list[RemovableHandle] = []

    def move(self, parts: Iterable[str], slots: Iterable[GradientSlot], *, to_cpu: bool) -> None:
        """Move some of `PARTS`; those that are there already stay as they are. Gradients are looked for in `slots`."""
        moving = {part for part in parts if (part in self._away) is not to_cpu}
        copy = self._to_host if to_cpu else self._to_device
        gradients: list[tuple[GradientSlot, torch.Tensor]] = []
        if moving & {"parameters", "gradients"}:
            gradients = self._take(slots)
        if "gradients" in moving:
            gradients = [(slot, map_local(gradient, copy)) for slot, gradient in gradients]
        if "parameters" in moving:
            self._weights.apply(copy)
        self._put(gradients)
        if "optimizer" in moving and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:  # AdamW's step counters stay where they are
                        state[name] = map_local(value, copy)
        self._away = self._away | moving if to_cpu else self._away - moving
        self._device.synchronize()
        if to_cpu and moving and self._device.kind != "cpu":
            torch.get_device_module(self._device.kind).empty_cache()  # else only this process could use what is free
        self._guard()

    def forget_gradients(self) -> None:
        """Drop what is held here."""
        self._aside.clear()

    def _take(self, slots: Iterable[GradientSlot]) -> list[tuple[GradientSlot, torch.Tensor]]:
        """Take all gradients out of their places: a tensor that has one cannot change its device."""
        taken, self._aside = self._aside, []
        for slot in slots:
            gradient = slot.get()
            if gradient is not None:
                taken.append((slot, gradient))
                slot.set(None)
        return taken

    def _put(self, gradients: list[tuple[GradientSlot, torch.Tensor]]) -> None:
        for slot, gradient in gradients:
            if slot.takes(gradient):
                slot.set(gradient)
            else:
                self._aside.append((slot, gradient))

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # The allocator of pinned memory keeps the source until a copy under way is done.
        return tensor.to(self._device.torch_device, non_blocking=True)

    def _guard(self) -> None:
        """Refuse what would crash, or train something else, while parts are away; on the CPU as on accelerators."""
        for handle in self._guards:
            handle.remove()
        self._guards = []
        if self._away:
            # In front of a wrapper's own hook, which would gather missing parameters.
            self._guards.append(self._weights.module.register_forward_pre_hook(self._refuse_forward, prepend=True))
            if self._optimizer is not None:
                self._guards.append(self._optimizer.register_step_pre_hook(self._refuse_step))

    def _refuse_forward(self, *_: object) -> None:
        needed = {"parameters", "gradients"} if torch.is_grad_enabled() else {"parameters"}
        self._refuse(needed, "run the model")

    def _refuse_step(self, *_: object) -> None:
        self._refuse(set(PARTS), "step the optimizer")

    def _refuse(self, needed: set[str], what: str) -> None:
        missing = [part for part in PARTS if part in self._away & needed]
        if missing:
            raise UnsupportedError(
                f"cannot {what}: {' and '.join(missing)} of this engine were moved to the CPU; call "
                f"engine.move(to_cpu=False, {', '.join(f'{part}=True' for part in missing)}) first"
            )
