"""From a model folder to a model: rank 0's in memory, the others' without weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from verl_engine.contract.errors import ModelError
from verl_engine.contract.model_code import why_not_loaded
from verl_engine.engine.weights.critic_config import become_critic
from verl_fsdp.config import ShardedConfig
from verl_fsdp.model.lora import inject_adapters
from verl_fsdp.model.packable import choose_attention
from verl_fsdp.model.trial import require_replay

_LOG = logging.getLogger(__name__)
_NUM_NAMED = 10


def load_model(config: ShardedConfig, model_folder: Path, attention: str | None = None) -> PreTrainedModel:
    """Load the model on the CPU of rank 0, and build the same one without weights on the others.

    Only rank 0 reads the folder, so the memory of a machine does not grow with its ranks. The others' parameters and
    buffers are on the meta device; `verl_fsdp.model.materialize` fills them. Weights are float32, or ``param_dtype``
    where there is nothing to train. What the folder lacks is drawn by ``seed``. The process's own random numbers are
    left alone. `attention` is transformers' name of a function; by default what `choose_attention` finds right.

    Raises:
        ModelError: the folder does not hold such a model; the cause is chained on rank 0, and every rank raises it.
    Collectives: a broadcast from rank 0, and one all-gather, of small objects.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return _read(config, model_folder, attention)
    model: PreTrainedModel | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            model = _read(config, model_folder, attention)
        except ModelError as error:
            failure = error
    plan: list[Any] = [None if model is None else (type(model), model.config, _attention(model)), str(failure or "")]
    dist.broadcast_object_list(plan, src=0)
    if plan[0] is None:
        raise failure or ModelError(plan[1])
    if model is None:
        try:
            model = _skeleton(config, *plan[0])
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            failure = error
    failures = [""] * num_ranks
    dist.all_gather_object(failures, "" if failure is None else f"{type(failure).__name__}: {failure}")
    for rank, text in enumerate(failures):
        if text:
            raise ModelError(
                f"model folder {model_folder}: rank {rank} cannot build a {plan[0][0].__name__} without weights: {text}"
            ) from failure
    assert model is not None
    return model


def _read(config: ShardedConfig, model_folder: Path, attention: str | None) -> PreTrainedModel:
    """Load the whole model, and find out how it is to attend."""
    try:
        with _seeded(config.seed):
            model, info = auto_class(config).from_pretrained(
                model_folder,
                **load_arguments(config, model_folder),
                dtype=_stored_dtype(config),
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            _require_plain(model, model_folder)
            if config.router_replay:
                require_replay(model)
            if attention is None:
                choose_attention(model, config)
            _finish(model, config)
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and a model's own code raise all kinds
        what_it_is = "critic (token classifier)" if config.head == "value" else "causal LM"
        raise ModelError(
            f"model folder {model_folder} does not hold a {what_it_is} that transformers can load: "
            f"{why_not_loaded(error)}"
        ) from error
    _report(model, model_folder, info)
    return cast("PreTrainedModel", model)


def auto_class(config: ShardedConfig) -> Any:
    """Return transformers' class to load the model with.

    A critic is a model for token classification whose single label is the value: its last layer takes the place of a
    language model's. Loaded from the folder of a language model it is drawn anew; a folder of a critic has it.
    """
    is_critic = config.head == "value"
    return transformers.AutoModelForTokenClassification if is_critic else transformers.AutoModelForCausalLM


def load_arguments(config: ShardedConfig, model_folder: Path) -> dict[str, Any]:
    """Return further arguments of ``from_pretrained``; ModelError where no critic exists, see `become_critic`."""
    if config.head != "value":
        return {}
    critic = transformers.AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    become_critic(critic, model_folder)
    return {"config": critic}


def _require_plain(model: Any, model_folder: Path) -> None:
    """Refuse what could not be trained, or not be saved as it was: adapters that the folder brings, narrow integers."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"model folder {model_folder} holds an adapter beside the model (adapter_config.json); merge it first "
            "(peft's merge_and_unload), or take its files out of the folder"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            f"model folder {model_folder} holds quantized weights; start from a folder whose weights are float32, "
            "bfloat16 or float16"
        )


def _skeleton(
    config: ShardedConfig, model_class: type[Any], model_config: PreTrainedConfig, attention: str
) -> PreTrainedModel:
    with _seeded(config.seed), torch.device("meta"):
        model = model_class._from_config(  # noqa: SLF001 - what from_config calls once it knows the class
            model_config, dtype=_stored_dtype(config), attn_implementation=attention
        )
        _finish(model, config)
    return cast("PreTrainedModel", model)


def _attention(model: PreTrainedModel) -> str:
    return cast("str", model.config._attn_implementation)  # noqa: SLF001 - no public access


def _finish(model: PreTrainedModel, config: ShardedConfig) -> None:
    """Do what every rank does to its model, with or without weights, in the same order."""
    if config.lora is not None:
        inject_adapters(model, config.lora, config.seed)


def _report(model: torch.nn.Module, model_folder: Path, info: dict[str, Any]) -> None:
    """Say what of the folder and the model did not meet; refuse other shapes, and a folder with none of the weights."""
    mismatched = sorted(str(entry) for entry in info.get("mismatched_keys", ()))
    missing = sorted(info.get("missing_keys", ()))
    unexpected = sorted(info.get("unexpected_keys", ()))
    if mismatched:
        raise ModelError(f"model folder {model_folder}: weights do not fit its config.json: {_some(mismatched)}")
    if unexpected and len(missing) >= len(list(model.parameters())):
        raise ModelError(
            f"model folder {model_folder}: it holds no weight of {type(model).__name__}, but {_some(unexpected)}"
        )
    if missing:
        _LOG.warning("model folder %s lacks %s: drawn anew, by engine.seed", model_folder, _some(missing))
    if unexpected:
        _LOG.warning(
            "model folder %s holds weights that %s does not have: %s",
            model_folder,
            type(model).__name__,
            _some(unexpected),
        )


def _some(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _stored_dtype(config: ShardedConfig) -> torch.dtype:
    """Return what weights are kept in: master weights are float32, a reference policy needs none."""
    return cast("torch.dtype", getattr(torch, config.param_dtype if config.forward_only else "float32"))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw by a seed inside, and leave the process's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):  # models are built on the CPU
        torch.manual_seed(seed)
        yield
