"""Weights under Hugging Face names, in and out of a Megatron model that is divided among ranks."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import WeightShard, WeightSpec
from verl_engine.engine.device import Device
from verl_engine.engine.weights.incoming import paired_shards, paired_weights
from verl_engine.engine.weights.model_files import ModelFiles
from verl_engine.engine.weights.model_folder import write_model_folder
from verl_engine.engine.weights.module_weights import is_first_rank
from verl_engine.engine.weights.shards import shard_of, shared_by
from verl_engine.engine.weights.tensor_shards import TensorShards
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel
from verl_megatron_mindspeed.weights.agreement import num_ranks, on_all_ranks
from verl_megatron_mindspeed.weights.folder import WeightFolder, missing_weights, report
from verl_megatron_mindspeed.weights.pieces import Block, Held
from verl_megatron_mindspeed.weights.places import blocks_of, find_places


@dataclass(frozen=True, slots=True)
class _HeldShard:
    """What a rank says of a weight that it holds a shard of."""

    spec: WeightSpec
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class WeightMap:
    """Where each Hugging Face weight lies in this rank's parameters, and which ranks hold the rest."""

    def __init__(self, model: MegatronModel, parallel: Parallel, device: Device) -> None:
        """Find where every parameter lies, and ask the other ranks.

        Raises:
            ModelError: a parameter that no Hugging Face weight is known for; on every rank.
        Collectives: an all-gather of small objects.
        """
        self._model = model
        self._device = device
        self._folder: Path | None = None
        self._files = ModelFiles({})

        def look() -> list[tuple[_HeldShard, bool]]:
            self._blocks = blocks_of(find_places(model, parallel))
            return [(_held_shard(name, block), block.is_copy) for name, block in self._blocks.items()]

        specs: dict[str, WeightSpec] = {}
        self._senders: dict[str, dict[_HeldShard, int]] = {}
        self._holders: dict[_HeldShard, list[int]] = {}
        for rank, held in enumerate(on_all_ranks(look, "the model's parameters")):
            for shard, is_copy in held:
                self._holders.setdefault(shard, []).append(rank)
                if not is_copy:
                    specs[shard.spec.name] = shard.spec
                    # Replicas are equal, and the first rank that has one sends it.
                    self._senders.setdefault(shard.spec.name, {}).setdefault(shard, rank)
        self._specs = {name: specs[name] for name in sorted(specs, key=_in_natural_order)}

    def specs(self) -> list[WeightSpec]:
        """List all weights of the model, on every rank the same, layer by layer."""
        return list(self._specs.values())

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Put full weights together one by one; each is valid until the next is taken.

        No more than one full weight is alive at a time, if the caller drops it before it takes the next. WeightsError
        where there is no such weight. Collectives: a broadcast, over all ranks, of each shard; what several hold is
        sent once.
        """
        for name in names:
            if name not in self._specs:
                raise WeightsError(f"weight {name} was asked for, and the model has none of that name")
            yield name, self._whole(self._specs[name])

    def _whole(self, spec: WeightSpec) -> torch.Tensor:
        own = self._blocks.get(spec.name)
        if num_ranks() == 1:
            assert own is not None
            return own.content().to(self._device.torch_device)
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=self._device.torch_device)
        for shard, sender in self._senders[spec.name].items():
            place = shard_of(whole, shard.offsets, shard.shape)
            sent = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            if sender == dist.get_rank():
                assert own is not None
                sent.copy_(own.content())
            # As bytes: not every dtype is known to every communication library.
            dist.broadcast(sent.view(-1).view(torch.uint8), src=sender)
            if sent is not place:
                place.copy_(sent)
        return whole

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's shard of each weight, empty where it holds none. No collectives."""
        for spec in self._specs.values():
            own = self._blocks.get(spec.name)
            view_shape, offsets, shape = self._place(spec)
            content = (
                torch.empty(shape, dtype=spec.dtype, device=self._device.torch_device) if own is None else own.content()
            )
            holders = [] if own is None else self._holders[_held_shard(spec.name, own)]
            yield WeightShard(spec.name, view_shape, offsets, content, *shared_by(holders, content.numel()))

    def load_full_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], get: Callable[[torch.Tensor], Held] | None = None
    ) -> None:
        """Copy full weights into the parameters; each rank cuts out its own shard. No collectives.

        `get` gives what else is to take them, such as float32 masters, which are not rounded as parameters are.
        WeightsError for a name or shape that the model does not have, or a weight that is missing.
        """
        for spec, whole in paired_weights(self._specs, weights, lambda spec: spec.shape):
            own = self._blocks.get(spec.name)
            if own is not None:
                own.fill(shard_of(whole, own.offsets, own.shape))
            if own is not None and get is not None:
                for offsets, part in own.parts(get):
                    part.copy_(shard_of(whole, offsets, part.shape))

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        """Copy shards into the parameters, as `weight_shards` of the same rank gives them. No collectives.

        WeightsError for a name or offsets that are not this rank's, or a weight that is missing.
        """
        for spec, part in paired_shards(self._specs, shards, self._place):
            own = self._blocks.get(spec.name)
            if own is not None:
                own.fill(part)

    def _place(self, spec: WeightSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return view shape, offsets and shape of this rank's shard, which is empty where it has none."""
        own = self._blocks.get(spec.name)
        if own is None:
            return spec.shape, (0,) * len(spec.shape), (0, *spec.shape[1:])
        return spec.shape, own.offsets, own.shape

    def load_folder(self, folder: Path) -> None:
        """Read the weights; each rank reads its own shards. A head that a critic's folder lacks stays as it is.

        Raises:
            ModelError: weights are missing, damaged or of another shape; on every rank.
        Collectives: an all-gather of small objects.
        """
        self._folder = folder
        if is_first_rank():
            self._files = ModelFiles.read(folder)
        fresh = self.read_folder_into(lambda parameter: parameter.detach())
        if not dist.is_initialized() or dist.get_rank() == 0:
            report(folder, self._specs, fresh, "lm_head.weight" if self._model.tied else "")

    def read_folder_into(self, get: Callable[[torch.Tensor], Held]) -> set[str]:
        """Read the weights of the folder of `load_folder` into something else, such as unrounded float32 masters.

        `get` gives what this rank holds for a parameter, live. Returns the weights that the folder lacks, of a critic's
        head; for them nothing was read. Raises as `load_folder`. Collectives: an all-gather of small objects.
        """
        folder = self._folder
        assert folder is not None, "load_folder comes first"

        def read() -> set[str]:
            with WeightFolder(folder) as found:
                fresh = missing_weights(found, self._specs, self._head_names())
                for name, block in self._blocks.items():
                    if name not in fresh:
                        for offsets, part in block.parts(get):
                            part.copy_(found.read(name, offsets, part.shape))
            return fresh

        return on_all_ranks(read, f"model folder {folder}")[0]

    def _head_names(self) -> set[str]:
        if self._model.head != "value":
            return set()
        return {*self._model.hf_names("output_layer.weight"), *self._model.hf_names("output_layer.bias")}

    def tensor_shards(
        self, get: Callable[[torch.Tensor], Held], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, TensorShards]:
        """Say by the weights' names what this rank holds of something kept for every parameter, which `get` gives live.

        All weights of the model come in the order of `specs`, maybe without any part. A tied output layer's copy is
        read from a checkpoint, not written into it; so are flat ranges of what the tensor-parallel ranks hold alike.
        """
        found = {}
        for spec in self._specs.values():
            block = self._blocks.get(spec.name)
            parts = [] if block is None else list(block.parts(get))
            is_written = block is None or not (block.is_copy or block.is_replica)
            found[spec.name] = TensorShards(spec.shape, dtype, parts, is_written=is_written)
        return found

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder, after the collectives of all `full_weights`; see `write_model_folder`."""
        hf_config = self._model.hf_config
        architectures = list(hf_config.architectures or ())
        language_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
        is_critic = any("Classification" in name for name in architectures)
        if not is_critic and isinstance(language_model, str):
            architectures = [language_model]
        write_model_folder(self.full_weights(list(self._specs)), self._files, folder, architectures)


def _held_shard(name: str, block: Block) -> _HeldShard:
    return _HeldShard(WeightSpec(name, block.whole_shape, block.dtype), block.offsets, block.shape)


def _in_natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort numbers in names as numbers."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
