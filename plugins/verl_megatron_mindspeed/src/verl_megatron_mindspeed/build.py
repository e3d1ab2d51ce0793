"""A megatron engine, top to bottom: groups of ranks, model, weights, optimizer and schedule."""

import os
from functools import partial
from pathlib import Path

import torch.distributed as dist

from verl_engine.engine.device import Device
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.engine import MegatronEngine
from verl_megatron_mindspeed.forward.schedule import Schedule
from verl_megatron_mindspeed.mindspeed.adaptor import check_same_patches
from verl_megatron_mindspeed.model.build import build_model, check_folder
from verl_megatron_mindspeed.parallel import build_groups
from verl_megatron_mindspeed.update.training import Training
from verl_megatron_mindspeed.weights.agreement import on_all_ranks
from verl_megatron_mindspeed.weights.weight_map import WeightMap


def build(config: MegatronConfig, model_folder: Path) -> MegatronEngine:
    """Build the engine; every rank does. Collectives: those of new groups, and all-gathers of small objects."""
    check_same_patches(config)
    device = Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    parallel = build_groups(config)
    with parallel.in_use():
        on_all_ranks(partial(check_folder, config, model_folder), "the model's config")
        model = build_model(config, model_folder, parallel, device)
        weights = WeightMap(model, parallel, device)
        weights.load_folder(model_folder)
        training = None if config.forward_only else Training(config, model, parallel, device)
        if training is not None and training.has_masters:
            weights.read_folder_into(training.held_master)  # unrounded, as the folder has them
        schedule = Schedule(config, model, parallel, device)
    return MegatronEngine(config, device, parallel, model, weights, training, schedule)
