"""Parts of the engine on the CPU, so that others can use its device meanwhile; and back."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.device import Device
from verl_engine.engine.offload import PARTS
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.update.memory import FlatMemory, to_host
from verl_megatron_mindspeed.update.training import Training


class Offload:
    """Which parts are on the CPU. While any is, what needs it is refused.

    Parameters that are away are tensors on the CPU, under the same objects: exports, snapshots and imports go on.
    On the CPU as device, all is done as on an accelerator.
    """

    def __init__(self, model: MegatronModel, training: Training | None, device: Device) -> None:
        self._model = model
        self._training = training
        self._device = device
        self._away: set[str] = set()
        self._flat = [] if training is None else list(_flat_parameters(training, device))

    def require(self, *parts: str) -> None:
        """Raise UnsupportedError while one of these parts is away."""
        missing = [part for part in PARTS if part in self._away and part in parts]
        if missing:
            raise UnsupportedError(
                f"{' and '.join(missing)} of this engine were moved to the CPU, and are needed here; call "
                f"engine.move(to_cpu=False, {', '.join(f'{part}=True' for part in missing)}) first"
            )

    @torch.no_grad()
    def move(self, *, to_cpu: bool, parameters: bool, gradients: bool, optimizer: bool) -> None:
        """Move parts; those that are there already stay as they are. On return all copies are complete.

        Parameters go with the modules' buffers, the optimizer with float32 masters; gradients of an accumulation under
        way are kept.
        """
        asked = zip(PARTS, (parameters, gradients, optimizer), strict=True)
        moving = {part for part, is_asked in asked if is_asked and (part in self._away) is not to_cpu}
        copy = to_host if to_cpu else self._to_device
        if "parameters" in moving:
            self._move_parameters(copy, to_cpu=to_cpu)
        if self._training is not None and "gradients" in moving:
            self._training.gradients.move(to_cpu=to_cpu)
        if self._training is not None and "optimizer" in moving:
            _move_optimizer(self._training, copy)
        self._away = self._away | moving if to_cpu else self._away - moving
        self._device.synchronize()
        if to_cpu and moving and self._device.kind != "cpu":
            torch.get_device_module(self._device.kind).empty_cache()  # else only this process could use what is free

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device.torch_device, non_blocking=True)

    def _move_parameters(self, copy: Callable[[torch.Tensor], torch.Tensor], *, to_cpu: bool) -> None:
        flat = set()
        for memory, views in self._flat:
            if to_cpu:
                memory.release()
            else:
                memory.take_back()  # with what was loaded meanwhile
            base = memory.copy if to_cpu else memory.flat
            assert base is not None
            for parameter, start, end in views:
                parameter.data = base[start:end].view(parameter.shape)
                flat.add(parameter)
        for chunk in self._model.chunks:
            for parameter in chunk.parameters():
                if parameter not in flat:
                    parameter.data = copy(parameter.data)
        _move_buffers(self._model.chunks, copy)
        if not to_cpu and self._training is not None:
            for chunk in self._training.chunks:
                _hook_again(chunk)


def _flat_parameters(
    training: Training, device: Device
) -> Iterator[tuple[FlatMemory, list[tuple[torch.nn.Parameter, int, int]]]]:
    """Yield Megatron's buffers of parameters, which the distributed optimizer needs, and the places of their views."""
    for chunk in training.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is not None:
                views = [(parameter, place[0], place[1]) for parameter, place in buffer.param_index_map.items()]
                yield FlatMemory(buffer.param_data, device), views


def _move_buffers(chunks: list[torch.nn.Module], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for chunk in chunks:
        for module in chunk.modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - setting one by name would make it persistent
                if buffer is not None:
                    if id(buffer) not in moved:
                        moved[id(buffer)] = (buffer, copy(buffer))  # the old one is kept, and its id with it
                    module._buffers[name] = moved[id(buffer)][1]  # noqa: SLF001 - the same


def _move_optimizer(training: Training, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for each in training.slices:
        if each.has_master:
            each.held.data = copy(each.held.data)
        state = each.inner.state.get(each.held, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:  # Adam's count stays where it is
                state[name] = copy(value)


def _hook_again(chunk: Any) -> None:
    """Put Megatron's hooks on parameters that lost theirs.

    A parameter whose ``data`` was on another device gets a new node in autograd's graph, without the hook that adds its
    gradient to Megatron's buffer: the gradient would stay zero, silently.
    """
    nodes = []
    trained = [parameter for parameter in chunk.module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        for parameter, known in zip(trained, chunk.grad_accs, strict=True):
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            if node is not known:
                node.register_hook(chunk._make_backward_post_hook(parameter))  # noqa: SLF001 - as Megatron itself does
            nodes.append(node)
    chunk.grad_accs = nodes
