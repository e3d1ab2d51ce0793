"""From text to tokens and back. Training and sampling both come through here, so they see the same prompt tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from verl_async.data.conversation_tokens import encode_conversation
from verl_async.data.examples import Conversation
from verl_async.data.turns import end_of_turn, ids_behind, text_ids
from verl_async.errors import DataError, OverlongError
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedTokenizerBase

    from verl_async.data.examples import Example
    from verl_async.data.prompts import Prompt


NO_SETTINGS: Final[Mapping[str, Any]] = {}


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    max_tokens: int,
    field: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> tuple[int, ...]:
    """Tokenize a prompt: a chat through the chat template with the generation prompt, a text as it stands.

    Args:
        tokenizer: of the model; adds its own special tokens to a text.
        prompt: a row of the prompt file.
        max_tokens: longest prompt allowed.
        field: dotted path of the config field that names the file; for messages.
        settings: arguments for the chat template.
    Raises:
        OverlongError: longer than ``max_tokens``; names the row.
        DataError: no tokens at all, or refused by the chat template; names the row.
        ModelError: a chat, but the tokenizer has no chat template; or a tokenizer that closes each text.
    """
    where = f"{field}, row {prompt.index}"
    ids = _prompt_ids(tokenizer, prompt.prompt, where, settings)
    if len(ids) > max_tokens:
        raise OverlongError(
            f"{where}: the prompt has {len(ids)} tokens; expected at most {max_tokens} (raise data.max_prompt_tokens, "
            "take the row out, or leave such rows out with data.overlong=drop)"
        )
    return tuple(ids)


def encode_example(
    tokenizer: PreTrainedTokenizerBase,
    example: Example | Conversation,
    max_tokens: int,
    field: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> Sequence:
    """Tokenize an example: its prompt as in `encode_prompt`, its response behind it, and the token that closes it.

    A text is closed by the end-of-sequence token, a chat by the token with which the template ends a turn; a response
    that ends in it already is not closed twice. What a template writes behind that token is left out: rollouts stop
    there.

    Args:
        tokenizer: of the model.
        example: a row of the example file.
        max_tokens: longest prompt and response together, closing token included.
        field: dotted path of the config field that names the file; for messages.
        settings: arguments for the chat template.
    Returns:
        The sequence; its loss mask is True on the response and the closing token only. A conversation's is True on each
        turn that is trained on; see `encode_conversation`.
    Raises:
        OverlongError: longer than ``max_tokens``; names the row.
        DataError: a prompt without tokens; names the row.
        ModelError: the tokenizer has no end-of-sequence token, or see `encode_prompt`.
    """
    where = f"{field}, row {example.index}"
    if isinstance(example, Conversation):

        def render(messages: list[dict[str, Any]], opened: bool) -> str:
            return _chat_text(tokenizer, messages, where, settings, add_generation_prompt=opened)

        sequence = encode_conversation(tokenizer, example, render, where)
        lengths = f"the conversation has {len(sequence)} tokens"
    else:
        prompt_ids = _prompt_ids(tokenizer, example.prompt, where, settings)
        response_ids = _response_ids(tokenizer, example, prompt_ids, where, settings)
        token_ids = np.array(prompt_ids + response_ids, dtype=np.int64)
        sequence = Sequence(token_ids, np.arange(len(token_ids)) >= len(prompt_ids))
        lengths = f"prompt and response have {len(prompt_ids)} + {len(response_ids)} = {len(token_ids)} tokens"
    if len(sequence) > max_tokens:
        raise OverlongError(
            f"{where}: {lengths}; expected at most {max_tokens} (raise data.max_tokens, take the row out, or leave "
            "such rows out with data.overlong=drop)"
        )
    return sequence


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Iterable[int] | None
) -> tuple[int, ...]:
    """Return the tokens that end a response.

    They are the tokenizer's end-of-sequence token, the one with which its chat template ends a turn, and those of the
    generation config.

    Args:
        tokenizer: of the model.
        generation_config_eos: ``eos_token_id`` of the model's generation config: one, several or none.
    Returns:
        Ascending, each once; empty where nothing is said.
    """
    if generation_config_eos is None:
        generation_config_eos = ()
    elif isinstance(generation_config_eos, int):
        generation_config_eos = (generation_config_eos,)
    own = {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}
    return tuple(sorted({*generation_config_eos, *own}))


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int], vocab_size: int | None, where: str
) -> None:
    """Check that the model has an embedding for each token.

    Args:
        tokenizer: with which they were made.
        token_ids: of a prompt or an example.
        vocab_size: of the model; None where its config does not say.
        where: field and row; for messages.
    Raises:
        DataError: a token is beyond it.
    """
    largest = max(token_ids)
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"{where}: token {largest} ({tokenizer.convert_ids_to_tokens(int(largest))!r}) is beyond the model's "
            f"vocab_size={vocab_size}, and the tokenizer has {len(tokenizer)} tokens: use the model's own tokenizer, "
            "give the model more embeddings (resize_token_embeddings), or take the row out"
        )


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> str:
    """Turn generated tokens into the text that is scored; special tokens, such as the closing one, are left out."""
    ids = list(token_ids)
    if ids and ids[-1] == end_of_turn(tokenizer):  # some templates end turns with a token that is not marked special
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)  # a list of texts only for a list of lists
    return text


def check_settings(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> None:
    """Check that the chat template reads its arguments: it would leave out others without an error.

    Raises:
        ConfigError: it does not mention one.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for name in settings:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(f"data.chat_template.{name}: the model's chat template does not read it; leave it out")


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], where: str, settings: Mapping[str, Any]
) -> list[int]:
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt, special_tokens=True)
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end and text_ids(tokenizer, prompt, special_tokens=False)[-1:] != [end]:
            raise ModelError(
                f"the tokenizer puts its end-of-sequence token {tokenizer.eos_token!r} behind each text, so there "
                "would be nothing to answer; set add_eos_token to false in the model folder's tokenizer_config.json"
            )
    else:
        ids = text_ids(tokenizer, _chat_text(tokenizer, prompt, where, settings), special_tokens=False)
    if not ids:
        raise DataError(f"{where}: the prompt {prompt!r} has no tokens; expected at least one")
    return ids


def _response_ids(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    prompt_ids: list[int],
    where: str,
    settings: Mapping[str, Any],
) -> list[int]:
    if isinstance(example.prompt, str):
        prompt, text, end = example.prompt, example.response, None
    else:
        prompt = _chat_text(tokenizer, example.prompt, where, settings)
        end = end_of_turn(tokenizer)
        answer = {"role": "assistant", "content": example.response}
        whole = _chat_text(tokenizer, [*example.prompt, answer], where, settings, add_generation_prompt=False)
        # Some templates write an earlier turn otherwise than the one that they open, such as without its thoughts.
        text = whole.removeprefix(prompt) if whole.startswith(prompt) else example.response
    end_id = _end_token_id(tokenizer) if end is None else end
    closing = str(tokenizer.convert_ids_to_tokens(end_id))
    if end is not None and closing in text:
        text = text[: text.rindex(closing)]  # what the template adds
    text = text.removesuffix(closing)  # what the response may have of its own
    return [*ids_behind(tokenizer, prompt, prompt_ids, text, special_tokens=isinstance(example.prompt, str)), end_id]


def _chat_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    where: str,
    settings: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{where}: the prompt is a chat, but the model folder's tokenizer has no chat template; "
            "add chat_template.jinja to the folder, or write prompts as text"
        )
    options = {**settings, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(chat, **options))
    except Exception as error:  # a template may raise anything: it is a program of the model's author
        raise DataError(f"{where}: the chat template refuses the prompt: {error}") from error


def _end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError(
            "the model folder's tokenizer has no end-of-sequence token, so responses would never end; "
            "set eos_token in its tokenizer_config.json"
        )
    return int(end)
