"""Engines of the mutants that export, import or adapt weights wrongly: fsdp2's, with one thing wrong each."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.fsdp2_engine import Fsdp2Engine
from verl_engine.engine.base import Engine, WeightSpec
from verl_engine.engine.weights.module_weights import Exported, local_tensors
from verl_fsdp.model.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from verl_engine.engine.base import WeightShard
    from verl_fsdp.config import Fsdp2Config


class WrongName(Fsdp2Engine):
    """Exports names with a wrapper's prefix."""

    def weight_specs(self) -> list[WeightSpec]:
        return [dataclasses.replace(spec, name=f"module.{spec.name}") for spec in super().weight_specs()]

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        inner = [name.removeprefix("module.") for name in names]
        return ((f"module.{name}", tensor) for name, tensor in super().full_weights(inner))


class StaleExport(Fsdp2Engine):
    """Exports what it gathered first, also after a step."""

    _gathered: dict[str, torch.Tensor] | None = None

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._gathered is None:
            every = [spec.name for spec in self.weight_specs()]
            self._gathered = {name: tensor.clone() for name, tensor in super().full_weights(every)}
        return ((name, self._gathered[name]) for name in names)

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_full_weights(weights)
        self._gathered = None


class TieBroken(Fsdp2Engine):
    """The output layer is a copy of the embedding that nobody trains."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        module = load_model(config, model_folder)
        is_tied = module.lm_head.weight is module.model.embed_tokens.weight
        if is_tied:
            module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone(), requires_grad=False)
        with mock.patch("verl_fsdp.fsdp2.build.load_model", return_value=module):
            engine = super().made(config, model_folder)
        if is_tied:
            del engine.parameters["lm_head.weight"]
        return engine


class TiedTwice(Fsdp2Engine):
    """Exports the output layer, and the embedding that it is."""

    def weight_specs(self) -> list[WeightSpec]:
        specs = super().weight_specs()
        embedding = specs[0]
        return [*specs, *([dataclasses.replace(embedding, name="lm_head.weight")] if self._is_tied() else [])]

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            inner = self.weight_specs()[0].name if name == "lm_head.weight" and self._is_tied() else name
            for _, tensor in super().full_weights([inner]):
                yield name, tensor

    def _is_tied(self) -> bool:
        return "lm_head.weight" not in self.parameters


class UnnotedImport(Fsdp2Engine):
    """Takes weights without saying that they are others now."""

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        noted = self.weights_id
        super().load_full_weights(weights)
        self.weights_id = noted


class ImportUnchecked(Fsdp2Engine):
    """Takes what it knows, and does not look at the rest."""

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_full_weights((name, tensor) for name, tensor in weights if name in self.parameters)


class NoImport(Fsdp2Engine):
    """Takes no weights."""

    load_full_weights = Engine.load_full_weights


class SavesWhatItLoaded(Fsdp2Engine):
    """Copies the folder that it was made from."""

    _model_folder: Path

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        engine._model_folder = model_folder
        return engine

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        if self.data_parallel.rank == 0:
            shutil.copytree(self._model_folder, folder, dirs_exist_ok=True)
        torch.distributed.barrier()


class AdapterLost(Fsdp2Engine):
    """Exports the model's own weights, as if there were no adapter."""

    def exported(self) -> dict[str, Exported]:
        return {name: Exported(entry.tensor) for name, entry in super().exported().items()}


class AdapterUnscaled(Fsdp2Engine):
    """Exports the adapter without alpha / rank."""

    def exported(self) -> dict[str, Exported]:
        return {
            name: dataclasses.replace(entry, low_rank=entry.low_rank and dataclasses.replace(entry.low_rank, scale=1.0))
            for name, entry in super().exported().items()
        }


class AdapterLeftOff(Fsdp2Engine):
    """Does not switch the adapter on again after an exception."""

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        layers: list[Any] = [module for module in self.model.modules() if hasattr(module, "_disable_adapters")]
        before = [layer.disable_adapters for layer in layers]
        for layer in layers:
            layer._disable_adapters = True
        yield
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


class AdapterFolderUnscaled(Fsdp2Engine):
    """Writes an adapter whose B is doubled, as if it had another alpha."""

    def save_adapter(self, folder: Path) -> None:
        def doubled(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            found = Fsdp2Engine.full_weights(self, names)
            return ((name, tensor * (2.0 if ".lora_B." in name else 1.0)) for name, tensor in found)

        with mock.patch.object(self, "full_weights", doubled):
            super().save_adapter(folder)


class AdapterUnderItsOwnNames(Fsdp2Engine):
    """Names the adapter's weights as the adapted model does, which no file of peft's does."""

    def exported_adapter(self) -> dict[str, Exported]:
        return {name.removeprefix("base_model.model."): entry for name, entry in super().exported_adapter().items()}

    def save_adapter(self, folder: Path) -> None:
        with mock.patch.object(type(self), "exported_adapter", Fsdp2Engine.exported_adapter):
            super().save_adapter(folder)


class FrozenInSnapshot(Fsdp2Engine):
    """Snapshots copy what is never trained, too."""

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return local_tensors((*self.parameters.items(), *self.module.named_buffers()))


class NothingForwardOnly(Fsdp2Engine):
    """Snapshots hold what is trained: of a forward-only engine, nothing."""

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in super().local_weights() if not self.config.forward_only)


class ForwardOnlyRounded(Fsdp2Engine):
    """Keeps a reference policy in bfloat16, whatever is configured."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        if config.forward_only:
            for _, tensor in engine.local_weights():
                tensor.copy_(tensor.bfloat16())
        return engine


class ForwardOnlyNotRefreshed(Fsdp2Engine):
    """Takes weights into a forward-only engine silently, and drops them."""

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.config.forward_only:
            super().load_full_weights(weights)


class AnyLayers(Fsdp2Engine):
    """Takes names of layers that are not there for all-linear."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        if config.lora is not None:
            config = config.model_copy(
                update={"lora": config.lora.model_copy(update={"target_modules": ("all-linear",)})}
            )
        return super().made(config, model_folder)


class ShardsAtTheStart(Fsdp2Engine):
    """Says of every part that it is the first."""

    def weight_shards(self) -> Iterator[WeightShard]:
        shards = super().weight_shards()
        return (dataclasses.replace(shard, offsets=(0,) * len(shard.offsets)) for shard in shards)


class ReplicasUnsaid(Fsdp2Engine):
    """Has the whole model on each rank, and says of every part that no other has it."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        return super().made(config.model_copy(update={"shard_ranks": 1}), model_folder)

    def weight_shards(self) -> Iterator[WeightShard]:
        return (dataclasses.replace(shard, replicas=(), is_replica=False) for shard in super().weight_shards())


class ShardsNotTaken(Fsdp2Engine):
    """Takes shards silently, and drops them."""

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        super().load_weight_shards(own if shard.tensor.numel() else shard for own, shard in self._with_own(shards))

    def _with_own(self, shards: Iterable[WeightShard]) -> Iterator[tuple[WeightShard, WeightShard]]:
        own = {shard.name: shard for shard in self.weight_shards()}
        return ((own.get(shard.name, shard), shard) for shard in shards)


class ShardsUnchecked(Fsdp2Engine):
    """Does not look at where a part belongs."""

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        places = {shard.name: shard.offsets for shard in self.weight_shards()}
        super().load_weight_shards(
            dataclasses.replace(shard, offsets=places.get(shard.name, shard.offsets)) for shard in shards
        )
