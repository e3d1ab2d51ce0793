"""``verl-engine train``: fully-asynchronous RL."""

from typing import TYPE_CHECKING

from verl_async.command.arguments import DryRun, Output, Overrides, Overwrite, Recipe

if TYPE_CHECKING:
    from verl_async.command.run_job import Runner
    from verl_async.config import TrainJob


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Output = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model by reinforcement learning (GRPO), rollouts and training side by side.

    The recipe names the model, the training engine (`engine.backend`; see `verl-engine backends`), the prompts and the
    reward. Everything is checked before the first process starts. Ctrl-C ends the job cleanly, and what it has
    measured so far is kept.

    **Examples**

    Check a job and see every setting:

    `verl-engine train examples/addition_grpo.yaml --dry-run`

    Run it:

    `verl-engine train examples/addition_grpo.yaml -o outputs/addition`

    Run it with settings of your own:

    `verl-engine train examples/addition_grpo.yaml engine.learning_rate=1e-4 rollout.n=16 -o outputs/lr1e-4`

    Run exactly the same job again:

    `verl-engine train outputs/addition/config.yaml -o outputs/again`
    """
    from verl_async.command.run_job import JobKind, JobRequest, run_job
    from verl_async.job import load_train_job
    from verl_async.preflight import check_train_job

    kind = JobKind("train", load_train_job, check_train_job, _import_runner)
    run_job(kind, JobRequest(recipe, overrides or (), output, overwrite=overwrite, dry_run=dry_run))


def _import_runner() -> "Runner[TrainJob]":
    from verl_async.ray.driver import run_train_job

    return run_train_job
