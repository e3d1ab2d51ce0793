"""The sections of a job's YAML file, validated without torch; ``engine`` and ``rollout`` are the chosen plugins'."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from verl_async.algorithms.kl import KlEstimator
from verl_async.algorithms.names import ADVANTAGES, LOSSES
from verl_async.data_config import DataConfig, NamedPath, SftDataConfig
from verl_async.evaluation_config import COLDEST, EvaluationConfig
from verl_async.references import known_or_reference
from verl_async.reward_config import LONGEST_S, RewardConfig
from verl_async.workflow_names import WORKFLOWS
from verl_engine.contract.bounded import Count, CountOrZero, NonNegative, Positive, Ranks, Threads
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.strict_model import StrictModel


class ModelConfig(StrictModel):
    """Which model is trained."""

    path: NamedPath
    """Hugging Face model folder: config.json, safetensors weights and the tokenizer."""


def _workflow_name(name: str) -> str:
    return known_or_reference(name, WORKFLOWS)


class RolloutConfig(StrictModel):
    """Who generates, and how."""

    backend: str = "embedded"
    """Name of the rollout engine (entry-point group ``verl_async.rollouts``), whose class validates the section."""
    num_workers: Ranks = 1
    """Rollout processes, each with its own copy of the model."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where they run; ``auto`` takes an NPU or GPU where there is one, else the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations while generating."""
    num_threads: Threads = 1
    """CPU threads of each rollout process."""
    n: int = Field(default=8, ge=2, le=2**16)
    """Samples drawn for each prompt: a GRPO group."""
    max_response_tokens: Count = 1024
    """Longest answer; of a conversation, all that comes behind the prompt."""
    temperature: float = Field(default=1.0, ge=COLDEST, le=1e4)
    """Of sampling; the trainer's log-probabilities use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: CountOrZero = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    workflow: Annotated[str, AfterValidator(_workflow_name)] = "single_turn"
    """How a prompt becomes what is trained on: ``single_turn``, one response; ``multi_turn``, a conversation with an
    environment of yours, such as a tool; or ``module:attribute`` of a workflow of your own."""
    workflow_config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the workflow, where that has one."""
    workflow_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """For what a workflow, or its environment, waits for in one sample between two turns of the model; then the job
    ends and names the sample. Turns of the model do not count."""
    max_batch_prompts: Ranks = 64
    """Prompts that one worker has room for at a time (times ``n`` sequences)."""
    deterministic: bool = False
    """Generate in batches that are the same at each run, so that the job is, bit for bit. Each waits for its longest
    response, so this is slower. Needs ``async_training.staleness_threshold: 0`` and ``trigger_parameter_sync_step:
    1``."""
    routed_experts: bool = False
    """Have the engine say through which experts tokens went, for ``engine.router_replay: true``, which sets it."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """For a worker to finish the next of its samples; then the job ends and names it."""

    def required_features(self) -> tuple[str, ...]:
        """Return which of what an engine may lack these settings need; see `verl_async.rollout.spec.FEATURES`."""
        is_filtered = self.top_k > 0 or self.top_p < 1
        return (("seeds", "sealed") if self.deterministic else ()) + (("filtered_log_probs",) if is_filtered else ())


class AsyncTrainingConfig(StrictModel):
    """How far rollouts may run ahead of training, in verl's terms."""

    staleness_threshold: float = Field(default=0.1, ge=0, le=1_000_000)
    """Between two weight syncs (1 + threshold) * trigger_parameter_sync_step * require_batches * mini_batch_size
    prompts may be rolled out, less the stale ones left over. 0 is on-policy: nothing is generated ahead."""
    trigger_parameter_sync_step: Count = 1
    """Training steps between two weight syncs."""
    require_batches: Ranks = 1
    """Mini-batches collected for one training step; each makes one optimizer step."""
    partial_rollout: bool = True
    """At a weight sync stop generation between two tokens and go on with the new weights; False waits for it to end."""
    queue_size: Count | None = None
    """Groups the sample queue holds before rollouts wait; by default what staleness allows."""


class KlConfig(StrictModel):
    """How the policy is held near the reference policy: the model that training began with."""

    coefficient: Positive = 0.001
    """The KL counts so many times."""
    estimator: KlEstimator = "k3"
    """Schulman's: with log r = reference - policy, k1 is -log r, k2 is (log r)^2 / 2, k3 is (r - 1) - log r. In the
    loss k1 does nothing on average, for the expectation of its gradient is 0; in the reward it is the usual one."""
    where: Literal["loss", "reward"] = "loss"
    """``loss`` adds the KL of each token to the loss; ``reward`` takes the sum over a response, under the old
    log-probs, off its reward."""


def _advantage_name(name: str) -> str:
    return known_or_reference(name, ADVANTAGES)


def _loss_name(name: str) -> str:
    return known_or_reference(name, LOSSES)


class AlgorithmConfig(StrictModel):
    """What is learned from the rewards."""

    advantage: Annotated[str, AfterValidator(_advantage_name)] = "grpo"
    """``grpo`` divides a group's centred rewards by their standard deviation, ``dr_grpo`` leaves them (Dr. GRPO); or
    ``module:attribute`` of an advantage of your own."""
    advantage_config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the advantage, where that is a class with one."""
    loss: Annotated[str, AfterValidator(_loss_name)] = "ppo"
    """``ppo``, the clipped policy loss; or ``module:attribute`` of a loss of your own."""
    loss_config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the loss, where that is a class with one."""
    loss_normalizer: Literal["tokens", "sequences"] | Positive = "tokens"
    """What the sum of an optimizer step's loss over its tokens is divided by: the number of its tokens in the loss, or
    of its sequences, or a constant, such as sequences times longest response (Dr. GRPO)."""
    old_log_probs: Literal["rollout", "recompute"] = "rollout"
    """What the ratio is taken against: the log-probs of the rollout, or those of the trainer's weights at the last
    weight sync, of which it keeps a snapshot where there are several training steps between syncs. With ``recompute``
    the loss ``ppo`` corrects the gap to the rollout by a truncated importance weight."""
    kl: KlConfig | None = None
    """KL to the reference policy: that is the model without its adapter (LoRA), or a second, forward-only engine in
    each trainer rank. By default there is none, and no reference either."""
    entropy_coefficient: NonNegative = 0.0
    """The entropy of each token's distribution counts so many times against the loss; needs ``engine.entropy:
    gradient``."""
    drop_uniform_groups: bool = True
    """Leave out groups whose advantages are all zero, as those of equal rewards are: they only cost time. A KL in the
    loss and an entropy bonus leave them out too."""


class _Length(StrictModel):
    """How long training takes: exactly one of steps and epochs."""

    num_steps: Count | None = None
    """Training steps; in RL each consumes require_batches * mini_batch_size prompts. Give this or ``num_epochs``."""
    num_epochs: Count | None = None
    """As many steps as it takes to draw every row so many times; the last step goes on into a further pass."""

    @property
    def steps(self) -> int:
        """Steps; of a job in epochs only after `verl_async.job.with_steps`."""
        assert self.num_steps is not None, "epochs are counted in steps when the rows are read"
        return self.num_steps

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"num_steps={_yaml(self.num_steps)}, num_epochs={_yaml(self.num_epochs)}: give one of them"
            )
        return self


def _yaml(number: int | None) -> str:
    return "null" if number is None else str(number)


class TrainerConfig(_Length):
    """The training side of the job."""

    num_ranks: Ranks = 1
    """Trainer processes. Each computes sequences of its own of every batch, or the same as others where the engine
    splits the model or its sequences over ranks."""
    mini_batch_size: int = Field(default=32, ge=1, le=2**20)
    """Prompts (groups of n samples) for one optimizer step."""
    max_tokens_per_micro_batch: Count = 8192
    """Token budget of one forward and backward on one rank, or on those together that split a micro-batch; a single
    longer sequence gets a micro-batch of its own."""
    master_port: int | None = Field(default=None, ge=1024, le=65535)
    """Port of the trainer's process group; by default a free one."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """For one call to the trainer ranks; then the job ends and names those that did not answer."""


class SftTrainerConfig(_Length):
    """Supervised training."""

    num_ranks: Ranks = 1
    """Trainer processes. Each computes sequences of its own of every batch, or the same as others where the engine
    splits the model or its sequences over ranks."""
    batch_size: int = Field(default=128, ge=1, le=2**20)
    """Examples for one optimizer step, over all ranks."""
    max_tokens_per_micro_batch: Count = 8192
    """Token budget of one forward and backward on one rank, or on those together that split a micro-batch; a single
    longer sequence gets a micro-batch of its own."""
    master_port: int | None = Field(default=None, ge=1024, le=65535)
    """Port of the trainer's process group; by default a free one."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """For one call to the trainer ranks; then the job ends and names those that did not answer."""


class WeightSyncConfig(StrictModel):
    """How new weights reach the rollout workers."""

    bucket_bytes: int = Field(default=256 * 2**20, ge=1024, le=2**50)
    """Size of a flat bucket; two are in flight. A larger single tensor gets a bucket of its own size."""
    transport: Literal["auto", "shared_memory", "object_store"] = "auto"
    """``shared_memory`` within one machine, ``object_store`` (Ray's) across machines; ``auto`` looks where they are."""
    timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """For one whole sync; then the job ends and names who did not answer."""


class RayConfig(StrictModel):
    """The Ray cluster."""

    address: str | None = None
    """Of a running cluster; by default one is started on this machine for the job and ended with it."""
    object_store_bytes: int = Field(default=256 * 2**20, ge=80 * 2**20, le=2**50)
    """Ray's shared memory when the job starts its own cluster."""


def _whole_engine(value: object) -> object:
    """Refuse an engine section that was not validated by its backend (see `verl_async.job`)."""
    if not isinstance(value, EngineConfig):
        raise ValueError("the engine section must be validated by its backend first")  # noqa: TRY004
    return value


def _whole_rollout(value: object) -> object:
    """The same for the rollout section."""
    if not isinstance(value, RolloutConfig):
        raise ValueError("the rollout section must be validated by its engine first")  # noqa: TRY004
    return value


AnyRolloutConfig = Annotated[SerializeAsAny[RolloutConfig], BeforeValidator(_whole_rollout)]
AnyEngineConfig = Annotated[SerializeAsAny[EngineConfig], BeforeValidator(_whole_engine)]


class ReadTrainJob(StrictModel):
    """An RL job whose engine section is not checked yet, as its backend does that."""

    model: ModelConfig
    engine: Any = None
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: AnyRolloutConfig = RolloutConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig
    evaluation: EvaluationConfig | None = None
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> ReadTrainJob:
        ahead = self.async_training
        if self.rollout.deterministic and (ahead.staleness_threshold > 0 or ahead.trigger_parameter_sync_step > 1):
            raise ValueError(
                "rollout.deterministic=true needs async_training.staleness_threshold=0 and trigger_parameter_sync_step="
                f"1, not {ahead.staleness_threshold:g} and {ahead.trigger_parameter_sync_step}: ahead of training, the "
                "time that things take decides which weights draw a token"
            )
        every = self.evaluation.every_steps if self.evaluation else None
        sync_step = self.async_training.trigger_parameter_sync_step
        if every and every % sync_step:
            raise ValueError(
                f"evaluation.every_steps={every} must be a multiple of async_training.trigger_parameter_sync_step="
                f"{sync_step}: in between, the rollout workers do not have the trainer's weights"
            )
        return self

    @property
    def sequences_per_step(self) -> tuple[str, int]:
        """How many sequences one optimizer step takes, and the settings that say so."""
        number = self.trainer.mini_batch_size * self.rollout.n
        return f"trainer.mini_batch_size * rollout.n = {number} sequences", number

    @property
    def rows_per_step(self) -> int:
        """Prompts that one training step takes."""
        return self.trainer.mini_batch_size * self.async_training.require_batches

    @property
    def optimizer_steps(self) -> int | None:
        """How many the job makes at most; None where it counts in epochs."""
        return None if self.trainer.num_steps is None else self.trainer.num_steps * self.async_training.require_batches


class TrainJob(ReadTrainJob):
    """A fully-async RL job: ``verl-engine train``."""

    engine: AnyEngineConfig


class ReadSftJob(StrictModel):
    """A supervised job whose engine section is not checked yet."""

    model: ModelConfig
    engine: Any = None
    data: SftDataConfig
    trainer: SftTrainerConfig
    rollout: AnyRolloutConfig = RolloutConfig()
    """Used by the evaluation only."""
    reward: RewardConfig = RewardConfig()
    """Used by the evaluation only."""
    evaluation: EvaluationConfig | None = None
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    ray: RayConfig = RayConfig()

    @property
    def sequences_per_step(self) -> tuple[str, int]:
        """How many sequences one optimizer step takes, and the settings that say so."""
        return f"trainer.batch_size={self.trainer.batch_size} sequences", self.trainer.batch_size

    @property
    def rows_per_step(self) -> int:
        """Examples that one training step takes."""
        return self.trainer.batch_size

    @property
    def optimizer_steps(self) -> int | None:
        """How many the job makes at most; None where it counts in epochs."""
        return self.trainer.num_steps


class SftJob(ReadSftJob):
    """A supervised job: ``verl-engine sft``."""

    engine: AnyEngineConfig
