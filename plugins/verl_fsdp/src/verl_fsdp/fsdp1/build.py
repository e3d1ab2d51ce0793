"""An fsdp engine, top to bottom: a Hugging Face model under PyTorch ``FullyShardedDataParallel`` (FSDP1)."""

from pathlib import Path

import torch.distributed as dist

from verl_fsdp.config import FsdpConfig
from verl_fsdp.engine import ShardedEngine, device_of_rank
from verl_fsdp.forward.micro_batch import MicroBatchForward
from verl_fsdp.fsdp1.parallelize import shard
from verl_fsdp.fsdp1.passes import FlatPasses
from verl_fsdp.fsdp1.weights import FlatWeights
from verl_fsdp.mesh import build_meshes
from verl_fsdp.model.loading import load_model
from verl_fsdp.update.grad_norm import clip_by_norm
from verl_fsdp.update.held_gradients import choose_sync
from verl_fsdp.update.optimizer import require_entrywise


def build(config: FsdpConfig, model_folder: Path) -> ShardedEngine:
    """Build the engine; ConfigError for an optimizer that looks at more than one entry of a parameter at a time.

    Weights lie in flat tensors, one for each wrapped module, cut evenly over ranks: so a rank's shard of a parameter
    is a vector, and may be empty. Names, shapes and dtypes outside are those of the model before it was wrapped.
    Collectives: of device meshes, a broadcast per weight, and for ``gradient_sync: auto`` an all-reduce.
    """
    if not config.forward_only:
        require_entrywise(config)
    device = device_of_rank(config)
    meshes = build_meshes(config, device.kind)
    model = load_model(config, model_folder)
    model_forward = MicroBatchForward(model, config, meshes.sequence)
    root, table = shard(model, config, meshes.weights, device.torch_device)
    weights = FlatWeights(root, table, meshes.weights, device.torch_device)
    shard_ranks = meshes.weights["shard"].size()
    # One frozen parameter beside a trained one has a gradient too, which nobody looks at.
    units = [unit for unit in weights.units if any(member.parameter.requires_grad for member in unit.members)]
    num_trained = sum(unit.numel for unit in units)
    must_reduce = "" if config.param_dtype == "float32" else "FSDP1 holds gradients in param_dtype"
    sync = choose_sync(config, num_trained, -(-num_trained // shard_ranks), device, must_reduce=must_reduce)
    parameters, num_copies = weights.parameters.values(), dist.get_world_size() // shard_ranks
    clip = clip_by_norm(parameters, config.max_grad_norm, plain_copies=num_copies, device=device.torch_device)
    passes = FlatPasses(root, device)
    return ShardedEngine(config, device, meshes.data_parallel, model_forward, weights, passes, sync, clip)
