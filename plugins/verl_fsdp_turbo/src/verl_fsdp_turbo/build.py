"""An fsdp_turbo engine, top to bottom: a Hugging Face model that the library shards."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.engine.abandoned_pass import groups_of
from verl_engine.engine.fully_sharded import fsdp_modules
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_fsdp.engine import ShardedEngine, device_of_rank
from verl_fsdp.mesh import divide_data
from verl_fsdp.model.float32_parts import float32_parameters
from verl_fsdp.model.loading import load_model
from verl_fsdp.model.materialize import Materializer
from verl_fsdp.model.packable import why_not_packed
from verl_fsdp.update.grad_norm import clip_by_norm
from verl_fsdp.update.held_gradients import choose_sync
from verl_fsdp_turbo.clipping import library_clip
from verl_fsdp_turbo.config import FsdpTurboConfig
from verl_fsdp_turbo.library import Library
from verl_fsdp_turbo.library_config import library_config
from verl_fsdp_turbo.modules import for_model
from verl_fsdp_turbo.parallel_state import divide_ranks
from verl_fsdp_turbo.passes import TurboForward, TurboPasses
from verl_fsdp_turbo.patches import Replacements
from verl_fsdp_turbo.ulysses import require_splittable, split_run


def build(config: FsdpTurboConfig, model_folder: Path) -> ShardedEngine:
    """Build the engine.

    Collectives: the library's, a broadcast per weight, and for ``gradient_sync: auto`` an all-reduce.
    """
    library, device, num_ranks = Library(), device_of_rank(config), dist.get_world_size()
    config.validate_world(num_ranks)
    values = library_config(config, num_ranks, device.kind)
    division = divide_ranks(library, values)
    data_parallel, sequence, split = division.data_parallel, division.ulysses, None
    if sequence is None:
        meshes = divide_data(config, device.kind, division.weights)
        data_parallel, sequence = meshes.data_parallel, meshes.sequence
        model = load_model(config, model_folder)
    else:
        model = _load_splittable(config, model_folder, sequence)
        split = partial(split_run, config, group=sequence, dtype=getattr(torch, config.param_dtype))
    replacements = Replacements()

    @contextmanager
    def in_use() -> Iterator[None]:
        with division.in_use(), replacements.in_use():
            yield

    model_forward = TurboForward(in_use, model, config, sequence, split)
    with division.in_use():
        root = _shard(model, config, library, values, replacements, device.torch_device)
    weights = EngineWeights(cast("torch.nn.Module", root))
    trained = [parameter for parameter in weights.parameters.values() if parameter.requires_grad]
    gathered = sum(_num_held(parameter, by=("ep",)) for parameter in trained)  # without other ranks' experts
    own = sum(_num_held(parameter) for parameter in trained)
    clip = library_clip(weights.module, trained, config.max_grad_norm, device.torch_device) or clip_by_norm(
        trained, config.max_grad_norm, plain_copies=num_ranks, device=device.torch_device
    )
    sync = choose_sync(config, gathered, own, device)
    return ShardedEngine(config, device, data_parallel, model_forward, weights, TurboPasses(root, in_use), sync, clip)


def _load_splittable(config: FsdpTurboConfig, model_folder: Path, group: dist.ProcessGroup) -> PreTrainedModel:
    """Load the model with the attention that the library's patches are for, where it splits sequences."""
    model = load_model(config, model_folder, attention="eager")
    require_splittable(model, dist.get_world_size(group))
    reason = why_not_packed(model) if config.packing else None
    if reason is not None:
        raise ModelError(
            f"engine.ulysses_parallel_size splits packed sequences, and {type(model).__name__} cannot be packed: "
            f"{reason}; set engine.ulysses_parallel_size=1"
        )
    return model


def _shard(
    model: PreTrainedModel,
    config: FsdpTurboConfig,
    library: Library,
    values: dict[str, Any],
    replacements: Replacements,
    device: torch.device,
) -> FSDPModule:
    """Let the library shard the model, and then give each rank its shard of the weights.

    Collectives: those of the library and of `Materializer`.
    """
    kept = sorted(float32_parameters(model, config))
    if kept:
        raise ModelError(
            f"engine.param_dtype={config.param_dtype}: transformers keeps {', '.join(kept[:3])} of "
            f"{type(model).__name__} in float32, and the library gathers all in one dtype; use float32, or the "
            "backend fsdp2"
        )
    values = for_model(values, model)
    fill = Materializer(model, device).defer()
    try:
        with replacements.recorded(values):
            wrapper = library.main.FSDPTurbo(library.build_config(values), model)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"fsdp_turbo cannot shard {type(model).__name__} as configured ({type(error).__name__}: {error})"
        ) from error
    root: FSDPModule = wrapper.model
    fill()
    _check_precision(root, config)
    _average(root)
    return root


def _check_precision(model: FSDPModule, config: FsdpTurboConfig) -> None:
    """Refuse parts that compute in another dtype than was asked for: some releases fix that of experts."""
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
        for group in groups_of(changing._get_fsdp_state()):  # noqa: SLF001 - torch has no public access
            if group.mesh_info.mesh.size() < num_ranks:
                changing.set_all_reduce_hook(partial(_divide, by=num_ranks // group.mesh_info.mesh.size()))


def _divide(reduced: torch.Tensor, by: int) -> None:
    reduced.div_(by)


def _num_held(parameter: torch.nn.Parameter, by: Sequence[str] | None = None) -> int:
    """Count the entries that a rank has of a parameter as some mesh axes divide it, or all; rounded up."""
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
