"""What a job reads before any process starts: tokenizer, prompts and their tokens, the reward function."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import transformers

from verl_async.asynchrony.samples import EncodedPrompt
from verl_async.asynchrony.scoring import Scorer
from verl_async.data.examples import read_examples
from verl_async.data.prompts import read_prompts
from verl_async.data.reward_pool import RewardPool
from verl_async.data.tokenization import check_vocabulary, encode_example, encode_prompt, stop_token_ids
from verl_async.errors import DataError
from verl_async.rollout.interface import SamplingParams
from verl_async.rollout.positions import max_num_tokens
from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.contract.model_code import why_not_loaded
from verl_engine.engine.weights.model_files import side_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from verl_async.config import RolloutConfig, SftJob, TrainJob
    from verl_async.data.prompts import Prompt
    from verl_async.reward_config import RewardConfig
    from verl_engine.batch.sequence import Sequence

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """How the model reads and ends texts."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    max_tokens: int | None
    """Of the longest sequence that the model has positions for; None where nothing limits it."""
    vocab_size: int | None = None
    """Token ids that the model has embeddings for; None where its config does not say."""

    @classmethod
    def load(cls, folder: Path) -> ModelTexts:
        """Load the tokenizer of a model folder.

        Raises:
            ModelError: it has none that transformers can load.
        """
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of a file that is not as expected anything may come
            raise ModelError(
                f"model.path={folder} has no tokenizer that transformers can load: {why_not_loaded(error)}"
            ) from error
        try:
            eos = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        except OSError:  # a folder need not have one
            eos = None
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            if "trust_remote_code" in str(error):
                raise ModelError(f"model.path={folder} cannot be loaded: {why_not_loaded(error)}") from error
            # What else is wrong, the engines say.
            config = transformers.PreTrainedConfig()
        vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        return cls(folder, tokenizer, stop_token_ids(tokenizer, eos), max_num_tokens(config), vocab_size)

    def encode(self, prompt: Prompt, max_tokens: int, field: str) -> EncodedPrompt:
        """Tokenize a prompt, and check that the model has its tokens.

        Raises:
            DataError: see `encode_prompt` and `check_vocabulary`.
        """
        token_ids = encode_prompt(self.tokenizer, prompt, max_tokens, field)
        check_vocabulary(self.tokenizer, token_ids, self.vocab_size, f"{field}, row {prompt.index}")
        return EncodedPrompt(prompt, token_ids)

    def sampling(self, config: RolloutConfig, temperature: float | None = None) -> SamplingParams:
        """Return how to sample; another temperature than the rollout's means evaluation, without top-p and top-k."""
        evaluating = temperature is not None
        return SamplingParams(
            max_new_tokens=config.max_response_tokens,
            temperature=config.temperature if temperature is None else temperature,
            top_p=1.0 if evaluating else config.top_p,
            top_k=0 if evaluating else config.top_k,
            stop_token_ids=self.stop_token_ids,
        )

    def scorer(self, config: RewardConfig, prompts: Iterable[EncodedPrompt], say: Callable[[str], None]) -> Scorer:
        """Return what scores the model's answers to some prompts, and says which could not be scored."""
        sources = frozenset(encoded.prompt.data_source for encoded in prompts)
        return Scorer(RewardPool(config), self.tokenizer, say, sources)

    def save(self, folder: Path) -> None:
        """Copy beside trained weights what their engine left out: the tokenizer's files as they are, templates, code.

        What cannot be copied is left out, with a warning: the weights are worth more.
        """
        for path in side_files(self.folder):
            target = folder / path.relative_to(self.folder)
            if target.exists():
                continue
            try:
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
            except OSError as error:
                _log.warning("%s cannot be copied to %s: %s", path, target, error)


def read_training_prompts(job: TrainJob, texts: ModelTexts) -> list[EncodedPrompt]:
    """Read and tokenize the training prompts.

    Raises:
        DataError: a row is malformed or too long.
        ConfigError: a prompt with its answer is longer than the model's positions.
    """
    limit = job.data.max_prompt_tokens
    prompts = [texts.encode(prompt, limit, "data.prompts") for prompt in read_prompts(job.data.prompts, "data.prompts")]
    _check_positions(prompts, job.rollout.max_response_tokens, texts.max_tokens, "data.prompts")
    return prompts


def read_evaluation_prompts(job: TrainJob | SftJob, texts: ModelTexts, max_tokens: int) -> list[EncodedPrompt]:
    """Read and tokenize the held-out prompts; none where no evaluation is configured.

    Raises:
        DataError: a row is malformed or too long.
        ConfigError: a prompt with its answer is longer than the model's positions.
    """
    if job.evaluation is None:
        return []
    prompts = [
        texts.encode(prompt, max_tokens, "evaluation.prompts")
        for prompt in read_prompts(job.evaluation.prompts, "evaluation.prompts", job.evaluation.num_prompts)
    ]
    _check_positions(prompts, job.rollout.max_response_tokens, texts.max_tokens, "evaluation.prompts")
    return prompts


def read_training_examples(job: SftJob, texts: ModelTexts) -> list[Sequence]:
    """Read and tokenize the supervised examples.

    Raises:
        DataError: a row is malformed or too long.
    """
    examples = [
        encode_example(texts.tokenizer, example, job.data.max_tokens, "data.examples")
        for example in read_examples(job.data.examples, "data.examples")
    ]
    for row, example in enumerate(examples):
        check_vocabulary(texts.tokenizer, example.token_ids, texts.vocab_size, f"data.examples, row {row}")
    longest = max(range(len(examples)), key=lambda row: len(examples[row]))
    if texts.max_tokens is not None and len(examples[longest]) > texts.max_tokens:
        raise DataError(
            f"data.examples, row {longest}: prompt and response have {len(examples[longest])} tokens; the model has "
            f"positions for {texts.max_tokens} (max_position_embeddings): take the row out"
        )
    return examples


def _check_positions(prompts: list[EncodedPrompt], num_new: int, max_tokens: int | None, field: str) -> None:
    """Find what a rollout would refuse, before one is started.

    Raises:
        ConfigError: the longest prompt, with its answer, has more tokens than the model has positions for.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_prompt = len(longest.token_ids)
    if max_tokens is not None and num_prompt + num_new > max_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens={num_new} after a prompt of {num_prompt} tokens ({field}, row "
            f"{longest.prompt.index}) makes {num_prompt + num_new} tokens; the model has positions for {max_tokens} "
            "(max_position_embeddings): lower it, or take long prompts out"
        )
