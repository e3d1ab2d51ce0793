"""The optimizer of the configured class, over groups of parameters with settings of their own."""

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.device import Device
from verl_engine.engine.optimizer import is_fused_on
from verl_engine.engine.optimizer import parameter_groups as divide_parameters
from verl_fsdp.config import ParameterGroup, ShardedConfig


def build_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    config: ShardedConfig,
    device: Device,
    num_dims: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over what is trained.

    Parameters of one dim (norms, biases) have no weight decay, unless ``decay_vectors`` or their group says so;
    `num_dims` has the dims of whole parameters where their shards do not show them. A group's rate is the engine's
    times its ``learning_rate_scale``, and follows the schedule.

    Raises:
        ConfigError: the class cannot be found or is no optimizer, it refuses what it is given, or the pattern of a
            group matches no trained parameter.
    """
    kind = find_class(config.optimizer)
    groups = parameter_groups(parameters, config, num_dims)
    arguments: dict[str, Any] = {"lr": config.learning_rate}
    if kind is torch.optim.AdamW:
        arguments |= {"betas": config.betas, "eps": config.eps, "fused": is_fused_on(device)}
    arguments |= config.optimizer_options
    try:
        optimizer = kind(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"engine.optimizer={config.optimizer} refuses lr={config.learning_rate} with "
            f"optimizer_options={config.optimizer_options}: {error}"
        ) from error
    decayed = sorted({group["weight_decay"] for group in groups if group["weight_decay"]})
    if decayed and "weight_decay" not in optimizer.defaults:
        # torch stores a group's unknown settings, and nobody reads them.
        raise ConfigError(
            f"engine.optimizer={config.optimizer} knows no weight_decay, and the config asks for {decayed}; set "
            "engine.weight_decay and that of parameter_groups to 0"
        )
    return optimizer


def find_class(path: str) -> type[torch.optim.Optimizer]:
    """Import an optimizer's class; ConfigError where there is none, it is no optimizer, or its step needs a closure."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module can raise anything when it is imported
        raise ConfigError(
            f"engine.optimizer={path}: module {module_name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    kind = getattr(module, name, None)
    if kind is None:
        close = difflib.get_close_matches(name, dir(module), n=3)
        meant = f"; close to it are {', '.join(close)}" if close else ""
        raise ConfigError(f"engine.optimizer={path}: module {module_name} has no {name}{meant}")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"engine.optimizer={path} is {kind!r}; it must be a subclass of torch.optim.Optimizer")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"engine.optimizer={path} computes the loss itself, several times per step; use one whose step needs "
            "no closure"
        )
    return kind


def require_entrywise(config: ShardedConfig) -> None:
    """Refuse an optimizer in whose step the entries of a parameter meet, such as by a norm, for FSDP1.

    That cuts parameters anywhere, as vectors: the steps would differ with the number of ranks, silently. So a
    small matrix is stepped as a whole, and in two pieces. What cannot be tried on the CPU is taken.
    """
    kind = find_class(config.optimizer)
    options = {"lr": 0.5, "weight_decay": config.weight_decay, **config.optimizer_options}
    if not config.weight_decay:
        del options["weight_decay"]
    whole = torch.arange(1.0, 25.0).cos()
    gradient = torch.arange(1.0, 25.0).sin()
    stepped = []
    for sizes, shape in (([24], (4, 6)), ([7, 17], (-1,))):
        pieces = [piece.clone().view(shape) for piece in whole.split(sizes)]
        try:
            optimizer = kind(pieces, **options)
            for factor in (1.0, -0.3):
                for piece, own in zip(pieces, gradient.split(sizes), strict=True):
                    piece.grad = own.view(shape) * factor
                optimizer.step()
        except Exception:  # noqa: BLE001 - it is made for other devices or shapes, and will say so itself
            return
        stepped.append(torch.cat([piece.flatten() for piece in pieces]))
    if not torch.allclose(stepped[0], stepped[1], rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"engine.optimizer={config.optimizer} steps a parameter otherwise when it is cut in pieces, and "
            "backend=fsdp cuts all of them; use backend=fsdp2, or an optimizer that steps each entry alone, such as "
            "torch.optim.AdamW"
        )


def parameter_groups(
    parameters: Mapping[str, torch.nn.Parameter], config: ShardedConfig, num_dims: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Divide the trained parameters by their settings; the arguments are those of `build_optimizer`."""
    chosen = _first_matches(parameters, config.parameter_groups)

    def settings(name: str, parameter: torch.nn.Parameter) -> dict[str, float]:
        is_vector = (parameter.ndim if num_dims is None else num_dims[name]) <= 1
        decay, scale = (0.0 if is_vector and not config.decay_vectors else config.weight_decay), 1.0
        group = chosen.get(name)
        if group is not None:
            decay = decay if group.weight_decay is None else group.weight_decay
            scale = group.learning_rate_scale
        return {"lr": config.learning_rate * scale, "weight_decay": decay}

    return divide_parameters(parameters, settings)


def _first_matches(
    parameters: Mapping[str, torch.nn.Parameter], groups: tuple[ParameterGroup, ...]
) -> dict[str, ParameterGroup]:
    """Map trained parameters to the first group that matches them."""
    chosen: dict[str, ParameterGroup] = {}
    for index, group in enumerate(groups):
        where = f"engine.parameter_groups[{index}].pattern={group.pattern!r}"
        matching = [name for name in parameters if re.search(group.pattern, name)]
        if not matching:
            close = difflib.get_close_matches(group.pattern, parameters, n=3, cutoff=0.0)
            raise ConfigError(f"{where} matches no parameter of the model; close to it are {', '.join(close)}")
        trained = [name for name in matching if parameters[name].requires_grad]
        if not trained:
            raise ConfigError(f"{where} matches only parameters that are not trained, such as {matching[0]}")
        mine = [name for name in trained if name not in chosen]
        if not mine:
            raise ConfigError(
                f"{where} matches only parameters that groups before it have, such as {trained[0]}; the first group "
                "that matches counts"
            )
        chosen |= dict.fromkeys(mine, group)
    return chosen
