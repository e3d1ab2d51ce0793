"""From a Hugging Face folder to this rank's part of Megatron's model; its weights are read later.

How the schedule calls a chunk (`MegatronModel.chunks`), for micro-batches of packed sequences:

- ``input_ids`` and ``position_ids`` [1, t] int64 on every stage: the tokens of this context-parallel rank, t a multiple
  of ``tensor_parallel_size`` under sequence parallelism. ``attention_mask`` None.
- ``packed_seq_params``, in the format thd: where sequences begin, padding INCLUDED, counted over ALL context-parallel
  ranks, each length a multiple of twice their number; and the LONGEST padded sequence, or Megatron's rotary positions,
  which follow from these numbers, would run on from one sequence into the next. Padding lies behind its sequence, where
  causal attention does not see it.
- The last stage returns logits [1, t, padded vocabulary / tensor_parallel_size], or values [1, t, 1]; others hidden
  states [t, 1, hidden size] (a part of t under sequence parallelism). Chunks of bfloat16 and float16 return float32
  logits, unless they are called with ``fp32_output=False``. Logits at and past ``MegatronModel.vocab_size`` belong to
  no token: mask them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from transformers import PreTrainedConfig

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.device import Device
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.bridge import make_bridge
from verl_megatron_mindspeed.model.hf_config import read_hf_config
from verl_megatron_mindspeed.model.layers import block_spec, takes_local_layers
from verl_megatron_mindspeed.model.limits import check_model
from verl_megatron_mindspeed.model.names import fused_name, global_name
from verl_megatron_mindspeed.model.value_head import HF_NAMES, ValueHead
from verl_megatron_mindspeed.parallel import Parallel

_SEED_STRIDE: Final = 100_003
"""Between ranks; Megatron adds up to some thousands for those that split a layer."""


@dataclass(slots=True)
class MegatronModel:
    """This rank's part of the model."""

    chunks: list[torch.nn.Module]
    """One for each virtual pipeline stage of this rank; what forward calls. Training wraps them further."""
    transformer: TransformerConfig
    hf_config: PreTrainedConfig
    """A critic's is that of a token classifier."""
    folder: Path
    head: str
    """``language_model`` or ``value``; see `verl_engine.contract.engine_config`."""
    tied: bool
    """Whether the output layer has the embedding's weight; in a pipeline the last stage has a copy of its own."""
    vocab_size: int
    """Number of tokens; Megatron's matrices have as many rows more as `padded_vocab_size` says."""
    padded_vocab_size: int
    local: bool
    """Whether the layers are those in plain PyTorch."""
    bridge: Any
    """mbridge's, for this model."""
    first_expert: int
    """Number, from 0, of this rank's first expert."""
    device: Device

    def reseed_dropout(self) -> None:
        """Draw a new seed for dropout from the process's own random numbers, before each pass that trains.

        Checkpoints keep those, and know nothing of Megatron's: so a resumed run draws the same dropout. What each rank
        draws is its own, which is right for attention's dropout: no two ranks have the same tokens and heads.
        """
        if self.transformer.attention_dropout:
            _seed_dropout(self.device, int(torch.randint(2**62, ())))

    def parts(self) -> list[GPTModel]:
        """Return Megatron's models without whatever is wrapped around them."""
        return [_unwrapped(chunk) for chunk in self.chunks]

    def global_name(self, part: int, name: str) -> str:
        """Return the name in the whole model of a parameter of ``parts()[part]``: layers and experts counted over it.

        It is still that of the layers that were built; `hf_names` takes it.
        """
        layers = [layer.layer_number - 1 for layer in self.parts()[part].decoder.layers]
        return global_name(name, layers, self.first_expert)

    def hf_names(self, name: str) -> list[str]:
        """Return the Hugging Face weights, in order, of a weight of the whole model, of either kind of layers."""
        if self.head == "value" and name in HF_NAMES:
            return [HF_NAMES[name]]
        if self.tied and name == "output_layer.weight":  # mbridge says so for some models only
            name = "embedding.word_embeddings.weight"
        fused = fused_name(name, experts=self.transformer.num_moe_experts is not None)
        return cast("list[str]", self.bridge._weight_name_mapping_mcore_to_hf(fused))  # noqa: SLF001 - no public way


def check_folder(config: MegatronConfig, folder: Path) -> None:
    """Check that this rank can read a folder and run its model, before others wait for it. No collectives.

    Raises:
        ModelError: the folder holds no model, or one that these layers do not compute.
        ConfigError: the model cannot be divided as configured.
    """
    check_model(config, read_hf_config(config, folder), folder)


def build_model(config: MegatronConfig, folder: Path, parallel: Parallel, device: Device) -> MegatronModel:
    """Build this rank's part of the model of a folder; its weights are whatever the memory held, but for a fresh head.

    Raises:
        ModelError: the folder holds no model, or one that these layers do not compute.
        ConfigError: the model cannot be divided as configured, or a setting does not fit it.
    Collectives: with tied embeddings in a pipeline an all-reduce between its first and last stage.
    """
    hf_config = read_hf_config(config, folder)
    check_model(config, hf_config, folder)
    local = takes_local_layers(config, device.kind)
    bridge = make_bridge(config, hf_config, local=local, device_kind=device.kind)
    _seed_dropout(device, _first_seed(config, parallel))
    padded = -(-hf_config.vocab_size // parallel.tensor.size) * parallel.tensor.size
    tied = bool(hf_config.tie_word_embeddings) and config.head == "language_model"
    num_experts = bridge.config.num_moe_experts or 0
    model = MegatronModel(
        chunks=[],
        transformer=bridge.config,
        hf_config=hf_config,
        folder=folder,
        head=config.head,
        tied=tied,
        vocab_size=hf_config.vocab_size,
        padded_vocab_size=padded,
        local=local,
        bridge=bridge,
        device=device,
        first_expert=num_experts // parallel.expert.size * parallel.expert.rank,
    )
    num_stages = config.virtual_pipeline_parallel_size
    for stage in range(num_stages):
        chunk = _build_chunk(model, config, parallel, stage if num_stages > 1 else None)
        chunk.to(device.torch_device)
        if config.forward_only:
            chunk.requires_grad_(False)
        half = model.transformer.bf16 or model.transformer.fp16
        model.chunks.append(Float16Module(model.transformer, chunk) if half else chunk)
    return model


def _build_chunk(model: MegatronModel, config: MegatronConfig, parallel: Parallel, stage: int | None) -> GPTModel:
    try:
        chunk = _megatron_model(model, stage)
    except (AssertionError, ImportError, ValueError) as error:
        raise ConfigError(f"engine: Megatron cannot build the model with this config: {error}") from error
    if chunk.post_process and config.head == "value":
        std = model.hf_config.initializer_range
        chunk.output_layer = ValueHead(model.transformer, std, config.seed, parallel.tensor.group)
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    _zero_padding(model, chunk, parallel)
    return chunk


def _megatron_model(model: MegatronModel, stage: int | None) -> GPTModel:
    arguments = model.bridge._get_gptmodel_args()  # noqa: SLF001 - mbridge's own way, which ours overrides
    return GPTModel(
        config=model.transformer,
        transformer_layer_spec=block_spec(model.transformer, stage, local=model.local),
        **{**arguments, "vocab_size": model.padded_vocab_size},
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tied,
        vp_stage=stage,
    )


def _zero_padding(model: MegatronModel, chunk: GPTModel, parallel: Parallel) -> None:
    """Zero the rows of tokens that do not exist, which nobody loads."""
    weights = [chunk.embedding.word_embeddings.weight] if chunk.pre_process else []
    if chunk.post_process and model.head == "language_model" and chunk.output_layer.weight is not None:
        weights.append(chunk.output_layer.weight)
    rows = model.padded_vocab_size // parallel.tensor.size
    with torch.no_grad():
        for weight in weights:
            weight[max(0, min(rows, model.vocab_size - rows * parallel.tensor.rank)) :].zero_()


def _seed_dropout(device: Device, seed: int) -> None:
    """Seed what Megatron draws dropout from, and leave the process's own random numbers alone, which it would seed too.

    A tensor-parallel rank's number is added to the seed.
    """
    indices = [] if device.kind == "cpu" else [device.index]
    with torch.random.fork_rng(devices=indices, device_type="cuda" if device.kind == "cpu" else device.kind):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _first_seed(config: MegatronConfig, parallel: Parallel) -> int:
    """Return a seed of this rank's own, which those that split its layers share."""
    index = parallel.data.rank
    for group in (parallel.context, parallel.pipeline):
        index = index * group.size + group.rank
    return config.seed + _SEED_STRIDE * index


def _unwrapped(module: torch.nn.Module) -> GPTModel:
    """Return Megatron's model inside Float16Module and DistributedDataParallel."""
    while not isinstance(module, GPTModel):
        module = cast("torch.nn.Module", module.module)
    return module
