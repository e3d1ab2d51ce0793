"""The norm of the whole gradient, each element counted once, however many ranks hold it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from verl_megatron_mindspeed.update.slices import Slice
from verl_megatron_mindspeed.weights.places import Place


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a slice adds to the gradient's norm and counts."""

    part: Slice
    is_counted: bool
    """False for what another rank counts."""
    num_elements: int
    """Without those at its end that are padding."""


class GradientNorm:
    """Sums over all ranks of the world, in one all-reduce.

    Not Megatron's own. That leaves out replicas by marks on parameters, which are not there on matrices that were not
    initialized, nor on the grouped experts of Transformer Engine: it would count the first tensor-parallel rank alone.
    And it sums experts and the rest apart, over different ranks.
    """

    def __init__(
        self, slices: Sequence[Slice], places: Sequence[Place], device: torch.device, *, is_distributed: bool
    ) -> None:
        place_of = {id(place.parameter): place for place in places}
        self._counted = [_counted(each, place_of[id(each.parameter)], is_distributed) for each in slices]
        self._device = device
        weights = [each.is_counted for each in self._counted]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=device)

    def gradients(self) -> list[torch.Tensor]:
        """List this rank's gradients, live, as the optimizer takes them."""
        gradients = [each.part.held.grad for each in self._counted if each.part.held.grad is not None]
        assert len(gradients) == len(self._counted), "a slice has no gradient"
        return gradients

    def norm(self) -> float:
        """Return the L2 norm; not finite on every rank where an element is not on any. Collectives: an all-reduce."""
        total = torch.zeros((), device=self._device)
        gradients = self.gradients()
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients))  # noqa: SLF001 - as clip_grad_norm_ of torch
            # What is not finite in a replica that does not count still makes the sum not finite: 0 * inf is nan.
            total += (norms.square() * self._weights).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def num_zeros(self) -> int:
        """Count the elements that are exactly zero. Collectives: an all-reduce."""
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for gradient, each in zip(self.gradients(), self._counted, strict=True):
            if each.is_counted:
                total += each.num_elements - torch.count_nonzero(gradient.view(-1)[: each.num_elements])
        dist.all_reduce(total)
        return int(total)


def _counted(part: Slice, place: Place, is_distributed: bool) -> _Counted:
    """Decide whether this rank counts a slice; no other rank counts the same one."""
    is_counted = not (place.is_copy or place.is_replica)
    if not is_distributed:
        # Megatron's mark for what is not reduced with the rest, but among ranks that have the same experts.
        has_own_ranks = not getattr(part.parameter, "allreduce", True)
        rank = mpu.get_expert_data_parallel_rank() if has_own_ranks else mpu.get_data_parallel_rank(True)
        is_counted = is_counted and rank == 0
    width = part.parameter[0].numel()
    num_real = sum(piece.num_rows for piece in place.pieces) * width - part.start
    return _Counted(part, is_counted, max(0, min(part.held.numel(), num_real)))
