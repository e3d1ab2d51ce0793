"""The conformance kit catches broken engines: each mutant fails the check that is there for it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import pytest

from core.tests.fake_distributions import write_distribution
from tests.conformance_mutants import MUTANTS
from verl_engine.command.app import main
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.testing.conformance import ConformanceKit, Outcome, all_checks
from verl_engine.testing.conformance.reference import make_sequences
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist


class Case(NamedTuple):
    """What the kit must say of a mutant."""

    fails: str
    """The check that it fails."""
    says: str
    """Part of the reason."""
    passes: str
    """A check close by that has nothing to do with what is wrong; none where it cannot be loaded."""
    ranks: int = 1
    """How many show what is wrong, at least; those of checks of several ranks take two anyway."""


CASES: Final = {
    "wrong_scale": Case("accumulation/all_ranks", "the gradient is off by 0.5", "accumulation/one_rank"),
    "sync_on_every_micro_batch": Case("gradient_sync/last_only", "before the last", "accumulation/all_ranks"),
    "every_micro_batch_ignored": Case("gradient_sync/every_micro_batch", "does nothing", "gradient_sync/last_only"),
    "hook_not_entered": Case("gradient_sync/hook_calls", "entered engine_gradient_sync so: []", "accumulation/report"),
    "no_gradient_sync": Case("gradient_sync/last_only", "lacks gradient_sync", "accumulation/one_rank"),
    "own_normalizer": Case("accumulation/normalizers", "divided by sequences is off by", "accumulation/temperature"),
    "sums_only": Case("accumulation/report", "the metrics of the step are", "accumulation/temperature"),
    "unclosed_no_sync": Case("recovery/middle_micro_batch", "after an exception", "accumulation/all_ranks"),
    "held_gradients_kept": Case("recovery/middle_micro_batch", "after an exception", "recovery/first_micro_batch"),
    "bf16_accumulation": Case("accumulation/bf16", "not added up in float32", "accumulation/report"),
    "fp16_without_loss_scale": Case("accumulation/fp16", "the gradient of a small loss is", "accumulation/bf16"),
    "loss_scale_kept": Case("optimizer/fp16_overflow", "the loss scale is never lowered", "optimizer/adamw"),
    "loss_scale_left_in": Case("accumulation/fp16", "the gradient of a plain loss is", "accumulation/bf16"),
    "pass_not_reset": Case("recovery/backward", "after an exception in a backward", "accumulation/all_ranks"),
    "mixed_sequences": Case("log_probs/together", "nats", "log_probs/temperature"),
    "positions_go_on": Case("log_probs/positions", "nats", "log_probs/temperature"),
    "positions_ignored": Case("log_probs/own_positions", "nats", "log_probs/positions"),
    "fields_as_floats": Case("accumulation/fields", "came to the loss otherwise", "accumulation/temperature"),
    "temperature_of_the_token_before": Case(
        "accumulation/token_temperatures", "with a temperature per token is off by", "accumulation/temperature"
    ),
    "entropy_at_temperature_one": Case(
        "log_probs/entropy_value", "entropies at temperature 0.5 are off by", "log_probs/temperature"
    ),
    "entropy_without_gradient": Case(
        "log_probs/entropy_gradient", "with entropy=gradient the gradient", "log_probs/entropy_value"
    ),
    "top_k_at_temperature_one": Case("top_k/given_ids", "log-probs of given ids is off by", "log_probs/temperature"),
    "top_k_of_a_shard": Case("top_k/most_likely", "log-probs of the most likely ids are off", "top_k/given_ids"),
    "value_of_the_token_itself": Case("values/state_before_token", "values are off by", "values/new_head"),
    "head_dropout": Case("values/gradient", "the gradient of a loss on values is off", "values/state_before_token"),
    "critic_from_scratch": Case("values/new_head", "not the language model's", "values/saved_folder"),
    "critic_saved_without_head": Case("values/saved_folder", "the saved folder's plain model", "values/new_head"),
    "clip_after_step": Case("optimizer/clipping", "the gradient applied, against", "optimizer/schedules"),
    "clip_by_local_norm": Case("optimizer/clipping", "the gradient applied, against", "optimizer/schedules", ranks=2),
    "decayed_norms": Case("optimizer/adamw", "norms were", "optimizer/clipping"),
    "steps_and_returns_nothing": Case("optimizer/adamw", "must return an OptimizerStep", "log_probs/temperature"),
    "given_rate_ignored": Case("optimizer/given_rate", "is off by", "optimizer/schedules"),
    "given_rate_scheduled": Case("optimizer/given_rate", "is off by", "optimizer/schedules"),
    "skip_on_one_rank": Case("optimizer/not_finite", "(on rank 0)", "optimizer/clipping", ranks=2),
    "schedule_advances_on_a_skip": Case("optimizer/not_finite", "after a skipped step", "optimizer/adamw"),
    "aliasing_snapshot": Case("snapshots/independent", "aliases the live weights", "weights/export"),
    "aliasing_restore": Case("snapshots/exact", "restored after training", "snapshots/independent"),
    "restore_touches_optimizer": Case("snapshots/exact", "after a save and a further step", "snapshots/swapped"),
    "snapshot_beyond_the_limit": Case("snapshots/limit", "has no room for it", "snapshots/exact"),
    "snapshot_not_shared": Case("snapshots/shared", "not in shared memory", "snapshots/exact"),
    "unnoted_import": Case("snapshots/never_stale", "saved after an import of one changed number", "snapshots/exact"),
    "lost_buffer": Case("snapshots/buffers", "buffers that changed in training were lost", "snapshots/exact"),
    "wrong_name": Case("weights/export", "do not have the same names: lm_head.weight", "determinism/ranks_agree"),
    "stale_export": Case("accumulation/one_rank", "off by 1, relatively, most of all model.", "weights/export"),
    "temperature_in_inference_only": Case("accumulation/temperature", "is off by", "log_probs/temperature"),
    "tie_broken": Case("accumulation/tied", "is off by", "weights/tied"),
    "tied_twice": Case("weights/tied", "do not have the same names: lm_head.weight", "weights/export"),
    "saves_what_it_loaded": Case("weights/saved_folder", "weights differ", "weights/export"),
    "shards_at_the_start": Case("weights/shards", "do not make full weights", "weights/export", ranks=2),
    "shards_not_taken": Case("weights/shards_import", "imported in shards", "weights/shards"),
    "shards_unchecked": Case("weights/shards_refusals", "a shard that belongs elsewhere", "weights/shards_import"),
    "forward_only_rounded": Case("forward_only/log_probs", "differ", "forward_only/refusal"),
    "forward_only_not_refreshed": Case("forward_only/refreshed", "not used", "forward_only/log_probs"),
    "forward_only_not_kept": Case("forward_only/snapshot", "after an import", "forward_only/refreshed"),
    "experts_ignored": Case("router_replay/given", "log-probs are off by", "router_replay/said"),
    "experts_not_checked": Case("router_replay/refusals", "an expert that is not there", "router_replay/given"),
    "experts_of_the_neighbour": Case("router_replay/said", "are not those of the plain model", "router_replay/given"),
    "router_not_trained": Case("router_replay/given", "the gradient is off by", "router_replay/refusals"),
    "newest_engine_runs": Case("several_engines/in_turns", "of the actor is off by", "log_probs/temperature"),
    "ends_the_group": Case("several_engines/closing", "ended a process group that others use", "log_probs/temperature"),
    "adapter_lost": Case("lora/train", "unchanged: ['model.layers.0", "lora/unknown_layers"),
    "adapter_unscaled": Case("lora/merged", "nats", "lora/train"),
    "adapter_left_off": Case("lora/disabled", "the adapter is not back", "lora/merged"),
    "adapter_folder_unscaled": Case("lora/adapter_folder", "differ from the exported", "lora/disabled"),
    "adapter_under_its_own_names": Case("lora/adapter_weights", "names that only one of them", "lora/adapter_folder"),
    "frozen_in_snapshot": Case("lora/snapshot", "one of the whole model", "lora/merged"),
    "any_layers": Case("lora/unknown_layers", "got ''", "lora/train"),
    "undeclared_gap": Case("weights/import", "lacks load_full_weights", "loading/spec"),
    "left_in_train_mode": Case("modes/inference", "left in train mode", "modes/training"),
    "left_in_eval_mode": Case("modes/training", "left in eval mode", "modes/inference"),
    "dropout_ignored": Case("modes/dropout_off", "is not that without dropout", "modes/training"),
    "random_seed": Case("determinism/same_seed", "the second run of one seed", "determinism/ranks_agree"),
    "schedule_not_resumed": Case("checkpoints/resume", "two steps after", "checkpoints/refusals"),
    "checkpoint_of_first_save": Case("checkpoints/keep_last", "loaded after step 2", "checkpoints/before_first_step"),
    "checkpoint_reads_late": Case("checkpoints/in_background", "optimizer or schedule leaked", "checkpoints/refusals"),
    "checkpoint_without_buffers": Case("checkpoints/buffers", "were lost", "checkpoints/resume"),
    "seeds_at_first_step": Case("checkpoints/random_numbers", "two steps with dropout", "checkpoints/resume"),
    "checkpoint_without_optimizer": Case("checkpoints/resume", "two steps after", "checkpoints/refusals"),
    "offload_loses_optimizer": Case("offload/there_and_back", "optimizer state was lost", "snapshots/swapped"),
    "offload_loses_gradients": Case(
        "offload/gradients_between_micro_batches", "a step whose gradients were moved", "offload/there_and_back"
    ),
    "offload_restarts_optimizer": Case(
        "offload/each_part", "a step after the parameters alone were moved", "offload/there_and_back"
    ),
    "saves_only_what_is_there": Case("offload/checkpoint", "a step after the resume", "checkpoints/resume"),
    "one_output_claimed": Case("config/ranks", "but ranks_with_outputs says (True, False)", "config/fields", ranks=2),
    "split_sequences_claimed": Case("config/ranks", "ranks with the same data lack a part", "config/fields", ranks=2),
    "replicas_unsaid": Case("weights/shard_replicas", "replicas and is_replica of shards are wrong", "weights/shards"),
    "vectors_never_decayed": Case("optimizer/decay_vectors", "is off by", "optimizer/adamw"),
    "of_another_api": Case("loading/listing", "its metadata says plugin API 1", ""),
    "reason_left_out": Case("loading/spec", "gives no reason for ['lora']", "loading/listing"),
    "field_without_meaning": Case("config/fields", "no docstring under silent", "config/wrong_fields"),
    "folder_not_named": Case("config/no_model", "must raise a ModelError that names the folder", "config/fields"),
    "import_unchecked": Case("weights/import_refusals", "an unknown name silently", "weights/import"),
    "temperature_in_training_only": Case("log_probs/temperature", "off by", "accumulation/temperature"),
    "numbers_outside_the_loss": Case("log_probs/without_loss", "outside the loss are not 0", "weights/export"),
    "mean_of_busy_ranks": Case("accumulation/rank_without_data", "most of all", "accumulation/all_ranks"),
    "cosine_is_linear": Case("optimizer/schedules", "the cosine schedule gave", "optimizer/adamw"),
    "never_gives_up": Case("optimizer/giving_up", "raised no TrainingDivergedError", "optimizer/not_finite"),
    "gradients_kept": Case("optimizer/zeroed", "the second gradient of an engine", "weights/export"),
    "failure_at_the_start": Case(
        "recovery/first_micro_batch", "in micro-batch 0 of 3", "recovery/last_micro_batch", ranks=2
    ),
    "failure_at_the_end": Case(
        "recovery/last_micro_batch", "in micro-batch 2 of 3", "recovery/first_micro_batch", ranks=2
    ),
    "norm_of_each_rank": Case("determinism/ranks_agree", "rank 1 reports", "determinism/same_seed"),
    "restores_the_first": Case("snapshots/swapped", "after swapped", "snapshots/exact"),
    "one_snapshot": Case("snapshots/tags", "tag 0 restored", "snapshots/exact"),
    "aliasing_while_away": Case("snapshots/offloaded", "taken while offloaded", "snapshots/independent"),
    "trains_a_reference": Case("forward_only/refusal", "that of an optimizer", "forward_only/log_probs"),
    "save_is_a_step": Case("checkpoints/before_first_step", "the first step after a save", "checkpoints/resume"),
    "loads_into_zeros": Case("checkpoints/refusals", "was refused, and changed", "checkpoints/resume"),
    "local_state_to_fewer": Case("checkpoints/to_fewer_ranks", "WeightsError", "checkpoints/resume"),
    "local_state_to_more": Case("checkpoints/to_more_ranks", "WeightsError", "checkpoints/resume"),
    "buffers_of_each_rank": Case("checkpoints/buffers", "their buffers differ", "snapshots/buffers", ranks=2),
    "ranks_alone": Case(
        "deadlock/uneven_micro_batches", "brings 2 micro-batches, all 2 ranks together 2", "loading/spec", ranks=2
    ),
    "lax_config": Case("config/wrong_fields", "silently", "config/fields"),
    "heavy_hooks": Case("loading/hooks_module", "imported torch", "loading/listing"),
    "silent_rank": Case(
        "deadlock/idle_ranks", "no result from ranks 0, 1 of 2 within 8 s", "deadlock/uneven_micro_batches"
    ),
}
CHECKS: Final = {check.name: check for check in all_checks()}
CONTROLS: Final = {
    check: [name for name, case in CASES.items() if case.passes == check]
    for check in dict.fromkeys(case.passes for case in CASES.values() if case.passes)
}
"""Which mutants pass a check: the first of every third check in every run, all of them in the nightly."""
HEAVY: Final = "import torch\nfrom tests.conformance_mutants import heavy_hooks as mutant\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every mutant as an installed distribution would offer it."""
    folder: Path = tmp_path_factory.mktemp("site")
    points = {f"mutant_{name}": f"tests.conformance_mutants:{name}" for name in MUTANTS}
    points["mutant_heavy_hooks"] = "heavy_hooks_module:mutant"
    old = {"mutant_of_another_api": points.pop("mutant_of_another_api")}
    write_distribution(folder, "old-mutants", {BACKENDS_GROUP: old}, keywords=["verl-engine-api-1"])
    write_distribution(folder, "mutants", {BACKENDS_GROUP: points}, modules={"heavy_hooks_module": HEAVY})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield


class Run(Protocol):
    """Runs one check on one mutant."""

    def __call__(self, name: str, check: str, *, ranks: int = 1, timeout_s: float = 60.0) -> Outcome: ...


@pytest.fixture
def run(installed: None, rank_pools: RankPools) -> Run:  # noqa: ARG001 - ranks find the mutants there
    """All mutants share ranks: they prepare nothing in a process."""

    def run_check(name: str, check: str, *, ranks: int = 1, timeout_s: float = 60.0) -> Outcome:
        ranks = 2 if "multi_rank" in CHECKS[check].features else ranks
        with ConformanceKit(f"mutant_{name}", ranks=ranks, timeout_s=timeout_s, lender=rank_pools.get) as kit:
            return kit.run(CHECKS[check])

    return run_check


@pytest.mark.parametrize("name", CASES)
def test_a_broken_engine_is_caught(run: Run, name: str) -> None:
    # A rank that waits forever is told by the time limit: not a minute of it here.
    case = CASES[name]
    failed = run(name, case.fails, ranks=case.ranks, timeout_s=8.0 if "within 8 s" in case.says else 60.0)
    assert failed.status == "failed"
    assert case.says in failed.reason
    assert failed.details


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(
            check, name, id=f"{check}-{name}", marks=[] if name == names[0] and index % 3 == 0 else pytest.mark.nightly
        )
        for index, (check, names) in enumerate(CONTROLS.items())
        for name in names
    ],
)
def test_what_is_not_broken_passes(run: Run, check: str, name: str) -> None:
    passed = run(name, check)
    assert (passed.status, passed.reason) == ("passed", "")


def test_a_declared_gap_is_skipped_with_its_reason(run: Run) -> None:
    outcome = run("declared_gap", "weights/import")
    assert (outcome.status, outcome.reason) == ("skipped", "declared gap 'weight_import': as the test says")


def test_gradients_are_read_without_weight_import(run: Run) -> None:
    outcome = run("declared_gap", "recovery/middle_micro_batch")
    assert outcome.status == "passed"


@pytest.mark.usefixtures("installed")
def test_the_command_fails_where_a_check_does(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "weights/export", "--only", "weights/import", "--only", "loading/spec"]
    with pytest.raises(SystemExit) as caught:
        main(["check", "mutant_wrong_name", *only, "--json"])
    assert caught.value.code == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["check"] for entry in report["passed"]] == ["loading/spec"]
    failures = {entry["check"]: entry for entry in report["failed"]}
    assert "do not have the same names" in failures["weights/export"]["error"]
    assert "Traceback" in failures["weights/export"]["details"]


@pytest.mark.fault(31)
def test_the_kits_sequences_are_free_of_the_padding_token() -> None:
    sequences = [sequence for seed in range(5) for sequence in make_sequences(20, seed)]
    assert 0 not in {int(token) for sequence in sequences for token in sequence.token_ids}
    assert tiny_config()["pad_token_id"] == 0


@pytest.mark.fault(31)
def test_every_check_has_a_mutant() -> None:
    assert {case.fails for case in CASES.values()} == CHECKS.keys()


def test_every_mutant_is_a_case() -> None:
    assert CASES.keys() == MUTANTS.keys() - {"declared_gap"}
