"""Parts of an engine on the CPU, so that others can use its device meanwhile; and back.

What is moved lies in pinned memory, and travels asynchronously. `Offload.move` waits for the copies before it returns,
so the host may read them, and then gives the device's memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # what nn.Module.to itself asks about DTensors
from torch.utils.hooks import RemovableHandle

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.device import Device

if TYPE_CHECKING:
    from verl_engine.engine.weights.engine_weights import EngineWeights

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
        """Begin with everything on the device."""
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._away: set[str] = set()
        self._aside: list[tuple[GradientSlot, torch.Tensor]] = []
        self._guards: list[RemovableHandle] = []

    def move(self, parts: Iterable[str], slots: Iterable[GradientSlot], *, to_cpu: bool) -> None:
        """Move some of `PARTS`; those that are there already stay as they are.

        Args:
            parts: the module with its buffers, gradients, the optimizer's state.
            slots: everywhere that gradients are kept.
            to_cpu: which way.
        """
        moving = {part for part in parts if (part in self._away) is not to_cpu}
        copy = self._to_host if to_cpu else self._to_device
        gradients: list[tuple[GradientSlot, torch.Tensor]] = []
        if moving & {"parameters", "gradients"}:
            gradients = self._take(slots)
        if "gradients" in moving:
            gradients = [(slot, _map_local(gradient, copy)) for slot, gradient in gradients]
        if "parameters" in moving:
            self._weights.apply(copy)
        self._put(gradients)
        if "optimizer" in moving and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:  # AdamW's step counters stay where they are
                        state[name] = _map_local(value, copy)
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


def apply_to_module(module: torch.nn.Module, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Do what ``module.to`` does, by another copy, and with shared buffers still shared.

    ``_apply`` is where wrappers hook in: fully_shard points its own references at the new storage there.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):  # changed in place, so it stays shared
            return _map_local(tensor, copy)
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, _map_local(tensor, copy))  # the old one is kept, and its id with it
        return moved[id(tensor)][1]

    module._apply(move)  # noqa: SLF001 - what module.to and module.cuda call


def _map_local(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Copy a tensor, or the shard inside a DTensor: its own methods would bring it to its mesh's device again."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return copy(tensor.detach())
    names, context = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}  # newer releases of torch list a DTensor's mesh too
    parts = {name: _map_local(part, copy) if isinstance(part, torch.Tensor) else part for name, part in held.items()}
    whole: torch.Tensor = type(wrapper).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return whole.detach()
