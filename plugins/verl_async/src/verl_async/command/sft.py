"""``verl-engine sft``: supervised training."""

from typing import TYPE_CHECKING

from verl_async.command.arguments import DryRun, Output, Overrides, Overwrite, Recipe

if TYPE_CHECKING:
    from verl_async.command.run_job import Runner
    from verl_async.config import SftJob


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Output = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model on examples of prompts and responses, such as a warm-up before `verl-engine train`.

    The recipe names the model, the training engine (`engine.backend`; see `verl-engine backends`) and the examples.
    With an `evaluation` section the model also answers held-out prompts, and training can stop once enough of the
    answers are right. Everything is checked before the first process starts. Ctrl-C ends the job cleanly.

    **Examples**

    Check a job and see every setting:

    `verl-engine sft examples/addition_sft.yaml --dry-run`

    Run it:

    `verl-engine sft examples/addition_sft.yaml -o outputs/warm-up`

    Run it for longer, on two ranks:

    `verl-engine sft examples/addition_sft.yaml trainer.num_steps=3000 trainer.num_ranks=2 -o outputs/warm-up-2`
    """
    from verl_async.command.run_job import JobKind, JobRequest, run_job
    from verl_async.job import load_sft_job
    from verl_async.preflight import check_sft_job

    kind = JobKind("sft", load_sft_job, check_sft_job, _import_runner)
    run_job(kind, JobRequest(recipe, overrides or (), output, overwrite=overwrite, dry_run=dry_run))


def _import_runner() -> "Runner[SftJob]":
    from verl_async.ray.driver import run_sft_job

    return run_sft_job
