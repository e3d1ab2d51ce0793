"""An fsdp2 engine, top to bottom: a Hugging Face model under PyTorch ``fully_shard``."""

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from verl_engine.engine.fully_sharded import FullyShardedPasses
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.engine import ShardedEngine, device_of_rank
from verl_fsdp.forward.micro_batch import MicroBatchForward
from verl_fsdp.fsdp2.parallelize import shard
from verl_fsdp.mesh import build_meshes
from verl_fsdp.model.loading import load_model
from verl_fsdp.update.grad_norm import clip_by_norm
from verl_fsdp.update.held_gradients import choose_sync


def build(config: Fsdp2Config, model_folder: Path) -> ShardedEngine:
    """Build the engine.

    Collectives: of device meshes, a broadcast per weight, and for ``gradient_sync: auto`` an all-reduce.
    """
    device = device_of_rank(config)
    meshes = build_meshes(config, device.kind)
    model = load_model(config, model_folder)
    model_forward = MicroBatchForward(model, config, meshes.sequence)
    root = shard(model, config, meshes.weights, device.torch_device)
    weights = EngineWeights(cast("torch.nn.Module", root))
    parameters = list(weights.parameters.values())
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    sync = choose_sync(config, num_trained, -(-num_trained // meshes.weights["shard"].size()), device)
    passes = FullyShardedPasses(root, keep_unsharded=config.keep_unsharded)
    num_ranks = dist.get_world_size()
    clip = clip_by_norm(parameters, config.max_grad_norm, plain_copies=num_ranks, device=device.torch_device)
    return ShardedEngine(config, device, meshes.data_parallel, model_forward, weights, passes, sync, clip)
