"""Refuses requests that cannot be served, before any of a batch is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transformers import AutoTokenizer

from verl_async.rollout.row import Row
from verl_async.rollout.stop_strings import StopStrings
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from verl_async.rollout.embedded_plugin import EmbeddedConfig
    from verl_async.rollout.interface import Completion, GenerationRequest

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class RequestCheck:
    """Makes rows of requests."""

    def __init__(self, max_num_tokens: int | None, config: EmbeddedConfig, model_folder: Path) -> None:
        self._max_num_tokens = max_num_tokens
        self._config = config
        self._folder = model_folder
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def rows(
        self, requests: Sequence[GenerationRequest], on_completion: Callable[[Completion], None]
    ) -> list[list[Row]]:
        """Return the rows of each request.

        Raises:
            ConfigError: a request has no prompt, no seed, or more tokens than the model or the cache has room for.
        """
        for place, request in enumerate(requests):
            self._check(request, f"requests[{place}]")
        return [
            [Row(request, index, on_completion, self._stop_strings(request)) for index in range(len(request.seeds))]
            for request in requests
        ]

    def _check(self, request: GenerationRequest, at: str) -> None:
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if num_prompt == 0:
            raise ConfigError(f"{at}.prompt_ids is empty; a prompt needs at least one token, such as BOS")
        if not request.seeds:
            raise ConfigError(f"{at}.seeds is empty; give one for each sample")
        if request.so_far and len(request.so_far) != len(request.seeds):
            raise ConfigError(f"{at}.so_far has {len(request.so_far)} entries for {len(request.seeds)} seeds")
        first = request.routed_experts_from
        if first is not None and not self._config.routed_experts:
            raise ConfigError(f"{at}.routed_experts_from={first} with rollout.routed_experts=false; set that to true")
        if first is not None and not 0 <= first < num_prompt:
            raise ConfigError(f"{at}.routed_experts_from={first} must be the index of one of its {num_prompt} tokens")
        if self._max_num_tokens is not None and num_prompt + num_new > self._max_num_tokens:
            raise ConfigError(
                f"rollout.max_response_tokens={num_new} after a prompt of {num_prompt} tokens ({at}) "
                f"makes {num_prompt + num_new} tokens; the model has positions for {self._max_num_tokens} "
                "(max_position_embeddings): lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
        if num_prompt + num_new > self._config.max_cache_tokens:
            raise ConfigError(
                f"rollout.max_cache_tokens={self._config.max_cache_tokens} has no room for the {num_prompt} tokens of "
                f"{at} and {num_new} new ones; raise it, or lower rollout.max_response_tokens or data.max_prompt_tokens"
            )

    def _stop_strings(self, request: GenerationRequest) -> StopStrings | None:
        strings = request.sampling.stop_strings
        if not strings:
            return None
        if self._tokenizer is None:
            # Without its files transformers would make an empty one.
            if not any((self._folder / name).is_file() for name in _TOKENIZER_FILES):
                raise ConfigError(
                    f"stop_strings={list(strings)}: {self._folder} has no tokenizer, so the text of tokens is not "
                    "known; use stop_token_ids"
                )
            self._tokenizer = AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        assert self._tokenizer is not None
        return StopStrings(self._tokenizer, strings)
