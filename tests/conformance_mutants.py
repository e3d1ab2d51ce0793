"""fsdp2 with one thing wrong each: what the conformance kit must catch.

Imports no torch, as hooks modules do not; the engines are in `tests.mutant_engines`, `tests.mutant_passes`,
`tests.mutant_exports` and `tests.mutant_states`.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.markers import hookimpl
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot


class MutantConfig(Fsdp2Config):
    """The same fields, under any name."""

    backend: str = "mutant"  # type: ignore[assignment] # fsdp2's own allows its own name only
    """The mutant's name."""


class LaxConfig(MutantConfig):
    """Ignores what it does not know."""

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, section: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if key in cls.model_fields}


class SilentConfig(MutantConfig):
    """Has a field of which nobody knows what it means."""

    silent: int = 0


class OneOutputConfig(MutantConfig):
    """Says that the first rank alone has outputs."""

    def ranks_with_outputs(self, world_size: int) -> tuple[bool, ...]:
        return tuple(rank == 0 for rank in range(world_size))


class SplitSequencesConfig(MutantConfig):
    """Says that ranks with different data split sequences."""

    def sequence_ranks(self, world_size: int) -> tuple[int, ...]:
        return tuple(range(world_size))


class Mutant:
    """fsdp2 around another engine class."""

    def __init__(
        self,
        name: str,
        engine_class: str = "Fsdp2Engine",
        config_class: type[MutantConfig] = MutantConfig,
        gaps: dict[str, str] | None = None,
    ) -> None:
        self.SPEC = BackendSpec(
            name=name, config_class=config_class, devices=("cpu",), capabilities=Capabilities(gaps or {})
        )
        self._engine_class = engine_class

    @hookimpl
    def engine_create(self, config: Fsdp2Config, model_folder: Path) -> Any:
        homes = [
            importlib.import_module(f"tests.{module}")
            for module in ("mutant_engines", "mutant_exports", "mutant_passes", "mutant_states")
        ]
        engine_class = next(getattr(home, self._engine_class) for home in homes if hasattr(home, self._engine_class))
        return engine_class.made(config, model_folder)


class EagerSync(Mutant):
    """Reduces at every micro-batch although only the last was asked for."""

    @hookimpl
    def engine_gradient_sync(self, engine: Any, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        del engine, is_last_micro_batch
        return nullcontext()


class DeafSync(Mutant):
    """Reduces at the last micro-batch only, also where each was asked for."""

    @hookimpl
    def engine_gradient_sync(self, engine: Any, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = engine.passes.gradient_sync(reduce=is_last_micro_batch)
        return context


class UnclosedNoSync(Mutant):
    """Switches reduction on again only where nothing went wrong."""

    @hookimpl
    def engine_gradient_sync(self, engine: Any, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last_micro_batch else _no_sync(engine)


@contextmanager
def _no_sync(engine: Any) -> Iterator[None]:
    engine.model.set_requires_gradient_sync(False)
    yield
    engine.model.set_requires_gradient_sync(True)


class AliasingSnapshot(Mutant):
    """Keeps the live tensors: on the CPU there seems nothing to copy."""

    @hookimpl
    def engine_copy_weights_to_cpu(self, engine: Any, snapshot: WeightSnapshot) -> WeightSnapshot:
        snapshot.tensors = {name: tensor.detach().cpu() for name, tensor in engine.local_weights()}
        return snapshot


class AliasingRestore(Mutant):
    """Puts the snapshot's own tensors in the place of the weights."""

    @hookimpl
    def engine_restore_weights_from_cpu(self, engine: Any, snapshot: WeightSnapshot) -> bool:
        for name, tensor in engine.local_weights():
            tensor.set_(snapshot.tensors[name])
        return True


class OwnCopies(Mutant):
    """Copies into memory of its own instead of the snapshot's."""

    @hookimpl
    def engine_copy_weights_to_cpu(self, engine: Any, snapshot: WeightSnapshot) -> WeightSnapshot:
        snapshot.tensors = {name: tensor.detach().cpu().clone() for name, tensor in engine.local_weights()}
        return snapshot


class OneSnapshot(Mutant):
    """Keeps one copy for all tags."""

    @hookimpl
    def engine_copy_weights_to_cpu(self, engine: Any, snapshot: WeightSnapshot) -> WeightSnapshot:
        snapshot.store(engine.local_weights())
        engine.kept = getattr(engine, "kept", snapshot.tensors)
        for name, tensor in engine.kept.items():
            tensor.copy_(snapshot.tensors[name])
        snapshot.tensors = engine.kept
        return snapshot


class RestoresTheFirst(Mutant):
    """Brings back what it brought back first, whatever is asked for."""

    @hookimpl
    def engine_restore_weights_from_cpu(self, engine: Any, snapshot: WeightSnapshot) -> bool:
        engine.first = getattr(engine, "first", snapshot)
        engine.first.copy_into(engine.local_weights())
        return True


class AliasingWhileAway(AliasingSnapshot):
    """Keeps the live tensors where they are on the CPU for a while."""

    @hookimpl
    def engine_copy_weights_to_cpu(self, engine: Any, snapshot: WeightSnapshot) -> WeightSnapshot:
        if not engine._is_away:
            return snapshot.store(engine.local_weights())
        return super().engine_copy_weights_to_cpu(engine, snapshot)


class LostBuffer(Mutant):
    """Snapshots hold parameters only."""

    @hookimpl
    def engine_copy_weights_to_cpu(self, engine: Any, snapshot: WeightSnapshot) -> WeightSnapshot:
        return snapshot.store(pair for pair in engine.local_weights() if pair[0] in engine.parameters)

    @hookimpl
    def engine_restore_weights_from_cpu(self, engine: Any, snapshot: WeightSnapshot) -> bool:
        snapshot.copy_into(pair for pair in engine.local_weights() if pair[0] in engine.parameters)
        return True


class RestoreTouchesOptimizer(Mutant):
    """Takes AdamW's moments for a part of what a snapshot brings back."""

    @hookimpl
    def engine_restore_weights_from_cpu(self, engine: Any, snapshot: WeightSnapshot) -> bool:
        engine.optimizer.state.clear()
        snapshot.copy_into(engine.local_weights())
        return True


class StepsAndReturnsNothing(Mutant):
    """Steps, and forgets to say what the step did."""

    @hookimpl
    def engine_optimizer_step(self, engine: Any, learning_rate: float | None) -> None:
        engine.optimizer_step(learning_rate)


MUTANTS = {
    mutant.SPEC.name.removeprefix("mutant_"): mutant
    for mutant in (
        AliasingRestore("mutant_aliasing_restore"),
        AliasingSnapshot("mutant_aliasing_snapshot"),
        AliasingWhileAway("mutant_aliasing_while_away", "SavesOnlyWhatIsThere"),
        OneSnapshot("mutant_one_snapshot"),
        RestoresTheFirst("mutant_restores_the_first"),
        Mutant("mutant_of_another_api"),
        Mutant("mutant_reason_left_out", gaps={"lora": " "}),
        Mutant("mutant_field_without_meaning", config_class=SilentConfig),
        Mutant("mutant_folder_not_named", "FolderNotNamed"),
        Mutant("mutant_import_unchecked", "ImportUnchecked"),
        Mutant("mutant_temperature_in_training_only", "TemperatureInTrainingOnly"),
        Mutant("mutant_numbers_outside_the_loss", "NumbersOutsideTheLoss"),
        Mutant("mutant_mean_of_busy_ranks", "MeanOfBusyRanks"),
        Mutant("mutant_cosine_is_linear", "CosineIsLinear"),
        Mutant("mutant_never_gives_up", "NeverGivesUp"),
        Mutant("mutant_gradients_kept", "GradientsKept"),
        Mutant("mutant_failure_at_the_start", "FailureAtTheStart"),
        Mutant("mutant_failure_at_the_end", "FailureAtTheEnd"),
        Mutant("mutant_norm_of_each_rank", "NormOfEachRank"),
        Mutant("mutant_trains_a_reference", "TrainsAReference"),
        Mutant("mutant_save_is_a_step", "SaveIsAStep"),
        Mutant("mutant_loads_into_zeros", "LoadsIntoZeros"),
        Mutant("mutant_local_state_to_fewer", "LocalState"),
        Mutant("mutant_local_state_to_more", "LocalState"),
        Mutant("mutant_buffers_of_each_rank", "BuffersOfEachRank"),
        Mutant("mutant_ranks_alone", "RanksAlone"),
        DeafSync("mutant_every_micro_batch_ignored"),
        EagerSync("mutant_sync_on_every_micro_batch"),
        LostBuffer("mutant_lost_buffer"),
        OwnCopies("mutant_snapshot_beyond_the_limit"),
        OwnCopies("mutant_snapshot_not_shared"),
        RestoreTouchesOptimizer("mutant_restore_touches_optimizer"),
        StepsAndReturnsNothing("mutant_steps_and_returns_nothing"),
        UnclosedNoSync("mutant_unclosed_no_sync"),
        Mutant("mutant_adapter_folder_unscaled", "AdapterFolderUnscaled"),
        Mutant("mutant_adapter_left_off", "AdapterLeftOff"),
        Mutant("mutant_adapter_lost", "AdapterLost"),
        Mutant("mutant_adapter_under_its_own_names", "AdapterUnderItsOwnNames"),
        Mutant("mutant_adapter_unscaled", "AdapterUnscaled"),
        Mutant("mutant_any_layers", "AnyLayers"),
        Mutant("mutant_bf16_accumulation", "Bf16Accumulation"),
        Mutant("mutant_checkpoint_of_first_save", "CheckpointOfFirstSave"),
        Mutant("mutant_checkpoint_reads_late", "CheckpointReadsLate"),
        Mutant("mutant_checkpoint_without_buffers", "CheckpointWithoutBuffers"),
        Mutant("mutant_checkpoint_without_optimizer", "CheckpointWithoutOptimizer"),
        Mutant("mutant_clip_after_step", "ClipAfterStep"),
        Mutant("mutant_clip_by_local_norm", "LocalNorm"),
        Mutant("mutant_critic_from_scratch", "CriticFromScratch"),
        Mutant("mutant_critic_saved_without_head", "CriticSavedWithoutHead"),
        Mutant("mutant_decayed_norms", "DecayedNorms"),
        Mutant("mutant_dropout_ignored", "DropoutIgnored"),
        Mutant("mutant_ends_the_group", "EndsTheGroup"),
        Mutant("mutant_entropy_at_temperature_one", "EntropyAtTemperatureOne"),
        Mutant("mutant_entropy_without_gradient", "EntropyWithoutGradient"),
        Mutant("mutant_experts_ignored", "ExpertsIgnored"),
        Mutant("mutant_experts_not_checked", "ExpertsNotChecked"),
        Mutant("mutant_experts_of_the_neighbour", "ExpertsOfTheNeighbour"),
        Mutant("mutant_router_not_trained", "RouterNotTrained"),
        Mutant("mutant_head_dropout", "HeadDropout"),
        Mutant("mutant_forward_only_not_kept", "NothingForwardOnly"),
        Mutant("mutant_forward_only_not_refreshed", "ForwardOnlyNotRefreshed"),
        Mutant("mutant_forward_only_rounded", "ForwardOnlyRounded"),
        Mutant("mutant_frozen_in_snapshot", "FrozenInSnapshot"),
        Mutant("mutant_held_gradients_kept", "HeldGradientsKept"),
        Mutant("mutant_given_rate_ignored", "GivenRateIgnored"),
        Mutant("mutant_given_rate_scheduled", "GivenRateScheduled"),
        Mutant("mutant_hook_not_entered", "HookNotEntered"),
        Mutant("mutant_lax_config", config_class=LaxConfig),
        Mutant("mutant_one_output_claimed", config_class=OneOutputConfig),
        Mutant("mutant_split_sequences_claimed", config_class=SplitSequencesConfig),
        Mutant("mutant_replicas_unsaid", "ReplicasUnsaid"),
        Mutant("mutant_vectors_never_decayed", "VectorsNeverDecayed"),
        Mutant("mutant_left_in_train_mode", "LeftInTrainMode"),
        Mutant("mutant_left_in_eval_mode", "LeftInEvalMode"),
        Mutant("mutant_newest_engine_runs", "NewestEngineRuns"),
        Mutant("mutant_no_gradient_sync", "NoGradientSync"),
        Mutant("mutant_mixed_sequences", "MixedSequences"),
        Mutant("mutant_offload_loses_gradients", "OffloadLosesGradients"),
        Mutant("mutant_offload_loses_optimizer", "OffloadLosesOptimizer"),
        Mutant("mutant_offload_restarts_optimizer", "OffloadRestartsOptimizer"),
        Mutant("mutant_fields_as_floats", "FieldsAsFloats"),
        Mutant("mutant_positions_go_on", "PositionsGoOn"),
        Mutant("mutant_positions_ignored", "PositionsIgnored"),
        Mutant("mutant_temperature_of_the_token_before", "TemperatureOfTheTokenBefore"),
        Mutant("mutant_random_seed", "RandomSeed"),
        Mutant("mutant_saves_only_what_is_there", "SavesOnlyWhatIsThere"),
        Mutant("mutant_schedule_advances_on_a_skip", "ScheduleAdvances"),
        Mutant("mutant_schedule_not_resumed", "ScheduleNotResumed"),
        Mutant("mutant_stale_export", "StaleExport"),
        Mutant("mutant_saves_what_it_loaded", "SavesWhatItLoaded"),
        Mutant("mutant_shards_at_the_start", "ShardsAtTheStart"),
        Mutant("mutant_shards_not_taken", "ShardsNotTaken"),
        Mutant("mutant_shards_unchecked", "ShardsUnchecked"),
        Mutant("mutant_seeds_at_first_step", "SeedsAtFirstStep"),
        Mutant("mutant_silent_rank", "SilentRank"),
        Mutant("mutant_skip_on_one_rank", "SkipOnOneRank"),
        Mutant("mutant_temperature_in_inference_only", "TemperatureInInferenceOnly"),
        Mutant("mutant_top_k_at_temperature_one", "TopKAtTemperatureOne"),
        Mutant("mutant_top_k_of_a_shard", "TopKOfAShard"),
        Mutant("mutant_tie_broken", "TieBroken"),
        Mutant("mutant_tied_twice", "TiedTwice"),
        Mutant("mutant_unnoted_import", "UnnotedImport"),
        Mutant("mutant_undeclared_gap", "NoImport"),
        Mutant("mutant_declared_gap", "NoImport", gaps={"weight_import": "as the test says"}),
        Mutant("mutant_value_of_the_token_itself", "ValueOfTheTokenItself"),
        Mutant("mutant_wrong_name", "WrongName"),
        Mutant("mutant_wrong_scale", "WrongScale"),
        Mutant("mutant_fp16_without_loss_scale", "Fp16WithoutLossScale"),
        Mutant("mutant_loss_scale_kept", "LossScaleKept"),
        Mutant("mutant_loss_scale_left_in", "LossScaleLeftIn"),
        Mutant("mutant_own_normalizer", "OwnNormalizer"),
        Mutant("mutant_pass_not_reset", "PassNotReset"),
        Mutant("mutant_sums_only", "SumsOnly"),
        Mutant("mutant_heavy_hooks"),
    )
}
globals().update(MUTANTS)  # an entry point names one of them
