"""The state that training goes on from, under Hugging Face names, so that any division of the ranks may read it."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from verl_engine.engine.weights.tensor_shards import TensorShards
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.update.optimizer import fill_state
from verl_megatron_mindspeed.update.training import Training
from verl_megatron_mindspeed.weights.weight_map import WeightMap

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def training_state(model: MegatronModel, weights: WeightMap, training: Training | None) -> dict[str, Any]:
    """Collect the state, live, as engines have it whose optimizer is torch's AdamW; without training weights only."""
    if training is None:
        dtype = next(iter(weights.specs())).dtype
        parts = weights.tensor_shards(lambda parameter: parameter.detach(), dtype=dtype)
        return {"model": parts, "buffers": _buffers(model)}
    fill_state(training.slices, training.num_updates)
    values = weights.tensor_shards(training.held_master)
    moments = {name: weights.tensor_shards(partial(training.held_moment, name)) for name in _MOMENTS}
    step = torch.tensor(float(training.num_updates))
    state = {name: {**{moment: moments[moment][name] for moment in _MOMENTS}, "step": step.clone()} for name in values}
    groups = _param_groups(training, values)
    found = {
        "model": values,
        "buffers": _buffers(model),
        "optimizer": {"state": state, "param_groups": groups},
        "schedule": _schedule(training, len(groups)),
    }
    if training.loss_scaler is not None:
        found["loss_scaler"] = training.loss_scaler.state_dict()
    return found


def load_state(model: MegatronModel, weights: WeightMap, training: Training | None, state: dict[str, Any]) -> None:
    """Take a state as `training_state` collects it; what it lacks stays as it is.

    Rates, weight decay and so on are the config's, not those of a run before.
    Collectives: with the distributed optimizer, all-gathers of the weights over the data-parallel ranks.
    """
    own = training_state(model, weights, training)
    _take_parts(own["model"], state["model"])
    for name, buffer in state.get("buffers", {}).items():
        if own["buffers"][name] is not buffer:
            own["buffers"][name].copy_(buffer)
    if training is None:
        return
    entries = state["optimizer"]["state"]
    for name, given in entries.items():
        _take_parts(own["optimizer"]["state"][name], given)
    if entries:
        training.num_updates = max(int(given["step"]) for given in entries.values())
    fill_state(training.slices, training.num_updates)
    training.num_steps = int(state["schedule"]["last_epoch"])
    if training.loss_scaler is not None and "loss_scaler" in state:
        training.loss_scaler.load_state_dict(state["loss_scaler"])
    training.bring_masters_to_model()


def _take_parts(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Copy this rank's shards of some weights in, where they are not the same memory, filled already."""
    for name, parts in own.items():
        if not isinstance(parts, TensorShards) or name not in given:
            continue
        others = dict(given[name].shards)
        for offsets, part in parts.shards:
            if part.data_ptr() != others[offsets].data_ptr():
                part.copy_(others[offsets])


def _param_groups(training: Training, values: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Describe what torch's AdamW would have: a group for each weight decay; vectors have none."""
    config = training.config
    nothing = torch.nn.Parameter(torch.zeros(1))
    defaults = torch.optim.AdamW([nothing], lr=training.scheduled_rate, betas=config.betas, eps=config.eps).defaults
    groups: dict[float, list[str]] = {}
    for name, whole in values.items():
        groups.setdefault(config.weight_decay if whole.ndim > 1 else 0.0, []).append(name)
    own = {**defaults, "initial_lr": config.learning_rate}
    return [{**own, "weight_decay": decay, "params": names} for decay, names in groups.items()]


def _schedule(training: Training, num_groups: int) -> dict[str, Any]:
    return {
        "base_lrs": [training.config.learning_rate] * num_groups,
        "last_epoch": training.num_steps,
        "lr_lambdas": [None] * num_groups,
        "_last_lr": [training.scheduled_rate] * num_groups,
        "_step_count": training.num_steps + 1,
    }


def _buffers(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Name the modules' live buffers as in the whole model; other pipeline stages have other ones."""
    return {
        model.global_name(index, name): buffer
        for index, part in enumerate(model.parts())
        for name, buffer in part.named_buffers()
    }
