"""What a job reads before any process starts: tokenizer, prompts and their tokens, the reward function."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import transformers

from verl_async.data.examples import read_examples
from verl_async.data.order import Mix
from verl_async.data.prompts import read_prompts
from verl_async.data.reward_pool import RewardPool
from verl_async.data.tokenization import (
    NO_SETTINGS,
    check_settings,
    check_vocabulary,
    encode_example,
    encode_prompt,
    stop_token_ids,
)
from verl_async.data_config import listed, weights_of
from verl_async.errors import DataError, OverlongError
from verl_async.orchestrator.samples import EncodedPrompt
from verl_async.orchestrator.scoring import Scorer
from verl_async.rollout.interface import SamplingParams
from verl_async.rollout.positions import max_num_tokens
from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.contract.model_code import why_not_loaded
from verl_engine.engine.weights.model_files import side_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from verl_async.config import RolloutConfig, SftJob, TrainJob
    from verl_async.data.examples import Conversation, Example
    from verl_async.data.prompts import Prompt
    from verl_async.evaluation_config import EvaluationSetConfig
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.reward_config import RewardConfig
    from verl_engine.batch.sequence import Sequence

_Row = TypeVar("_Row")
_Encoded = TypeVar("_Encoded")
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
    chat_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the chat template."""

    @classmethod
    def load(cls, folder: Path, chat_settings: Mapping[str, Any] = NO_SETTINGS) -> ModelTexts:
        """Load the tokenizer of a model folder.

        Raises:
            ConfigError: its chat template does not read one of the settings.
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
        check_settings(tokenizer, chat_settings)
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
        return cls(folder, tokenizer, stop_token_ids(tokenizer, eos), max_num_tokens(config), vocab_size, chat_settings)

    def encode(self, prompt: Prompt, max_tokens: int, field: str) -> EncodedPrompt:
        """Tokenize a prompt, and check that the model has its tokens.

        Raises:
            DataError: see `encode_prompt` and `check_vocabulary`.
        """
        token_ids = encode_prompt(self.tokenizer, prompt, max_tokens, field, self.chat_settings)
        check_vocabulary(self.tokenizer, token_ids, self.vocab_size, f"{field}, row {prompt.index}")
        return EncodedPrompt(prompt, token_ids)

    def sampling(self, config: RolloutConfig, held_out: EvaluationSetConfig | None = None) -> SamplingParams:
        """Return how to sample for training, or for a set of held-out prompts."""
        settings = config if held_out is None else held_out
        return SamplingParams(
            max_new_tokens=config.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_token_ids=self.stop_token_ids,
        )

    def scorer(
        self, config: RewardConfig, prompts: Iterable[EncodedPrompt], say: Callable[[str], None], timeline: Timeline
    ) -> Scorer:
        """Return what scores the model's answers to some prompts, and says which could not be scored."""
        sources = frozenset(encoded.prompt.data_source for encoded in prompts)
        return Scorer(RewardPool(config), self.tokenizer, say, timeline, sources)

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


def read_training_prompts(
    job: TrainJob, texts: ModelTexts, say: Callable[[str], None]
) -> tuple[list[EncodedPrompt], Mix]:
    """Read and tokenize the training prompts.

    Args:
        job: names files, limits, and what a prompt that is too long is.
        texts: of the model.
        say: told how many were left out.
    Returns:
        The prompts, file after file, and how they are mixed.
    Raises:
        DataError: a row is malformed or too long, or none is left.
        ConfigError: a prompt with its answer is longer than the model's positions.
    """
    limit = job.data.max_prompt_tokens
    files = [
        _fitting(read_prompts(path, field), partial(_encode, texts, limit, field), job.data.overlong, field, say)
        for field, path in listed(job.data.prompts, "data.prompts")
    ]
    prompts = list(chain.from_iterable(files))
    _check_positions(prompts, job.rollout.max_response_tokens, texts.max_tokens, "data.prompts")
    return prompts, Mix(tuple(map(len, files)), weights_of(job.data.prompts))


def read_evaluation_prompts(
    job: TrainJob | SftJob, texts: ModelTexts, max_tokens: int, say: Callable[[str], None]
) -> dict[str, list[EncodedPrompt]]:
    """Read and tokenize the held-out prompts, by the names of their sets; no set where no evaluation is configured.

    Raises:
        DataError: a row is malformed or too long, or none is left.
        ConfigError: a prompt with its answer is longer than the model's positions.
    """
    found = {}
    for name, config in job.evaluation.sets.items() if job.evaluation else ():
        field = f"evaluation.sets.{name}.prompts"
        rows = read_prompts(config.prompts, field, config.num_prompts)
        found[name] = _fitting(rows, partial(_encode, texts, max_tokens, field), job.data.overlong, field, say)
        _check_positions(found[name], job.rollout.max_response_tokens, texts.max_tokens, field)
    return found


def read_training_examples(job: SftJob, texts: ModelTexts, say: Callable[[str], None]) -> tuple[list[Sequence], Mix]:
    """Read and tokenize the supervised examples; as `read_training_prompts`.

    Raises:
        DataError: a row is malformed or too long, or none is left.
    """

    def encode(field: str, example: Example | Conversation) -> Sequence:
        where = f"{field}, row {example.index}"
        sequence = encode_example(texts.tokenizer, example, job.data.max_tokens, field, texts.chat_settings)
        check_vocabulary(texts.tokenizer, sequence.token_ids, texts.vocab_size, where)
        if texts.max_tokens is not None and len(sequence) > texts.max_tokens:
            raise OverlongError(
                f"{where}: the example has {len(sequence)} tokens; the model has positions for {texts.max_tokens} "
                "(max_position_embeddings): take the row out, or leave such rows out with data.overlong=drop"
            )
        return sequence

    files = [
        _fitting(read_examples(path, field), partial(encode, field), job.data.overlong, field, say)
        for field, path in listed(job.data.examples, "data.examples")
    ]
    return list(chain.from_iterable(files)), Mix(tuple(map(len, files)), weights_of(job.data.examples))


def _encode(texts: ModelTexts, max_tokens: int, field: str, prompt: Prompt) -> EncodedPrompt:
    return texts.encode(prompt, max_tokens, field)


def _fitting(
    rows: list[_Row], encode: Callable[[_Row], _Encoded], overlong: str, field: str, say: Callable[[str], None]
) -> list[_Encoded]:
    """Tokenize rows; those that are too long are an error, or left out and counted."""
    kept, errors = [], []
    for row in rows:
        try:
            kept.append(encode(row))
        except OverlongError as error:
            if overlong == "error":
                raise
            errors.append(str(error).partition(" (")[0])
    if errors:
        left_out = f"{len(errors)} of {len(rows)} rows are left out (data.overlong=drop), such as {errors[0]}"
        if not kept:
            raise DataError(f"{field}: {left_out}; none is left")
        say(f"warning: {field}: {left_out}")
    return kept


def _check_positions(prompts: list[EncodedPrompt], num_new: int, max_tokens: int | None, field: str) -> None:
    """Find what a rollout would refuse, before one is started.

    Raises:
        ConfigError: the longest prompt, with its answer, has more tokens than the model has positions for.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_prompt = len(longest.token_ids)
    if max_tokens is not None and num_prompt + num_new > max_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens={num_new} after a prompt of {num_prompt} tokens ({field}, "
            f"{longest.prompt.row}) makes {num_prompt + num_new} tokens; the model has positions for {max_tokens} "
            "(max_position_embeddings): lower it, or take long prompts out"
        )
