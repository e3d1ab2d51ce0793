"""The fsdp_turbo engine: a Hugging Face model that the library shards."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from verl_engine.contract.errors import ConfigError, ModelError
from verl_fsdp.forward.micro_batch import output_of
from verl_fsdp.fsdp2.engine import FullyShardedEngine
from verl_fsdp.fsdp2.gradient_sync import fsdp_modules
from verl_fsdp.mesh import Meshes, divide_data
from verl_fsdp.model.float32_parts import float32_parameters
from verl_fsdp.model.loading import load_model
from verl_fsdp.model.materialize import Materializer
from verl_fsdp.model.packable import why_not_packed
from verl_fsdp.update.held_gradients import choose_sync
from verl_fsdp_turbo import patches
from verl_fsdp_turbo.clipping import library_clip, unscale
from verl_fsdp_turbo.library import Library
from verl_fsdp_turbo.library_config import library_config
from verl_fsdp_turbo.modules import for_model
from verl_fsdp_turbo.parallel_state import divide_ranks
from verl_fsdp_turbo.ulysses import require_splittable, split_run

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.device import Device
    from verl_engine.engine.temperature import Temperature
    from verl_engine.engine.token_output import TokenOutput
    from verl_fsdp.config import ShardedConfig
    from verl_fsdp_turbo.config import FsdpTurboConfig


class TurboEngine(FullyShardedEngine):
    """See `FullyShardedEngine`."""

    config: FsdpTurboConfig

    def __init__(self, config: FsdpTurboConfig, model_folder: Path) -> None:
        """Build the engine; see the base class. Collectives: for ``gradient_sync: auto`` an all-reduce more."""
        self._library = Library.load()
        self._ulysses: dist.ProcessGroup | None = None
        super().__init__(config, model_folder)
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gathered, own = sum(map(_num_gathered, trained)), sum(map(_num_own, trained))
        self.sync = choose_sync(config, gathered, 1, self.device, num_own=own)
        self._clip = library_clip(trained, self.device.torch_device)

    @property
    def stays_on_cpu(self) -> bool:
        """Whether the library keeps weights on the CPU."""
        return self.config.stays_on_cpu

    def divide_ranks(self, config: ShardedConfig, device: Device) -> Meshes:
        """Let the library divide the ranks; see the base class."""
        turbo = cast("FsdpTurboConfig", config)
        config.validate_world(dist.get_world_size())
        self._values = library_config(turbo, dist.get_world_size(), device.kind)
        sizes = {name: size for name, size in self._values["distributed"].items() if name.endswith("_size")}
        division = divide_ranks(self._library, self._library.build_config(self._values), sizes)
        self._ulysses = division.ulysses
        if self._ulysses is None:
            return divide_data(config, device.kind, division.weights)
        return Meshes(division.weights, division.data_parallel, self._ulysses)

    def load(self, config: ShardedConfig, model_folder: Path) -> PreTrainedModel:
        """Load the model; with the attention that the library's patches are for, where it splits sequences."""
        if self._ulysses is None:
            return load_model(config, model_folder)
        model = load_model(config, model_folder, attention="eager")
        require_splittable(model, dist.get_world_size(self._ulysses))
        reason = why_not_packed(model) if config.packing else None
        if reason is not None:
            raise ModelError(
                f"engine.ulysses_parallel_size splits packed sequences, and {type(model).__name__} cannot be packed: "
                f"{reason}; set engine.ulysses_parallel_size=1"
            )
        return model

    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Let the library shard the model, and then give each rank its shard of the weights; see the base class.

        Collectives: those of the library and of `Materializer`.
        """
        kept = sorted(float32_parameters(model, config))
        if kept:
            raise ModelError(
                f"engine.param_dtype={config.param_dtype}: transformers keeps {', '.join(kept[:3])} of "
                f"{type(model).__name__} in float32, and the library gathers all in one dtype; use float32, or the "
                "backend fsdp2"
            )
        values = for_model(self._values, model)
        pending = patches.without_done(values)
        fill = Materializer(model, device.torch_device).defer()
        try:
            with patches.keep_reductions():
                wrapper = self._library.main.FSDPTurbo(self._library.build_config(pending), model)
        except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"fsdp_turbo cannot shard {type(model).__name__} as configured ({type(error).__name__}: {error})"
            ) from error
        patches.note_done(values)
        sharded: torch.nn.Module = wrapper.model
        fill()
        self._check_precision(cast("FSDPModule", sharded), config)
        _average(cast("FSDPModule", sharded))
        return sharded

    def run(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch; see the base class."""
        if self._ulysses is None:
            return super().run(batch, temperature)
        run = split_run(self.config, batch, self._ulysses, getattr(torch, self.config.param_dtype))
        return output_of(self.model, self.head, run, batch, temperature, self._ulysses)

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks, by the library's function where that is right; see the base class."""
        if self._clip is None:
            return super().clip_gradients()
        if self.loss_scaler is not None:
            unscale(self.parameters.values(), self.loss_scaler.scale)
        return torch.tensor(self._clip(model=self.model, max_norm=self.config.max_grad_norm))

    def _check_precision(self, model: FSDPModule, config: ShardedConfig) -> None:
        """Check that every part computes in the dtype that was asked for: some releases fix that of experts.

        Raises:
            ConfigError: one does not.
        """
        wanted = getattr(torch, config.param_dtype)
        for module in fsdp_modules(model):
            found: Any = module._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001 - torch has no public access
            if found not in (wanted, None):
                kind = str(found).removeprefix("torch.")
                raise ConfigError(
                    f"engine.param_dtype={config.param_dtype}: the installed fsdp_turbo computes "
                    f"{type(module).__name__} in {kind}, whatever its config says; set engine.param_dtype={kind}"
                )


def _average(model: FSDPModule) -> None:
    """Let every gradient be the sum of what all ranks have found, divided by their number.

    The library sets the number as torch's divisor. What becomes of one that is not the size of the group differs: some
    devices cannot apply it, some releases of torch leave it out, and others apply it twice, where the group is of one
    rank. So each group takes its own mean, and what is left to divide by is the number of such groups: experts are
    reduced over fewer ranks than have had a part in their gradients.
    """
    num_ranks = dist.get_world_size()
    for module in fsdp_modules(model):
        changing = cast("Any", module)
        changing.set_gradient_divide_factor(None)
        state: Any = changing._get_fsdp_state()  # noqa: SLF001 - torch has no public access
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:  # noqa: SLF001
            if group is not None and group.mesh_info.mesh.size() < num_ranks:
                changing.set_all_reduce_hook(functools.partial(_divide, by=num_ranks // group.mesh_info.mesh.size()))


def _divide(reduced: torch.Tensor, by: int) -> None:
    reduced.div_(by)


def _num_gathered(parameter: torch.nn.Parameter) -> int:
    """Count the entries that a rank has of a parameter while it is gathered: not those of other ranks' experts."""
    return _divided(parameter, by=("ep",))


def _num_own(parameter: torch.nn.Parameter) -> int:
    """Count the entries of a rank's shard; the same on every rank, so rounded up."""
    return _divided(parameter, by=None)


def _divided(parameter: torch.nn.Parameter, by: Iterable[str] | None) -> int:
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    sharing = math.prod(
        mesh.size(dim)
        for dim, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate) and (by is None or names[dim] in by)
    )
    return -(-parameter.numel() // sharing)
