"""How a chat template ends a turn, and which tokens a response has behind its prompt."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER: Final = "Answer7"
"""A response to look for in what a template makes of it."""
_ANCHORS: Final = ("\n", " ", "a", "0", ".", ":", ")")


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends an assistant's turn; None where it has no such token.

    It is the first special or added token behind the response, such as ``<|im_end|>``.
    """
    template = getattr(tokenizer, "chat_template", None)  # not every kind of tokenizer has the attribute
    return None if template is None else _end_of_turn(tokenizer, str(template))


@lru_cache(maxsize=8)
def _end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    del template  # a part of the key: it may be replaced
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError):  # it takes other chats only
        return None
    _, found, behind = text.rpartition(_ANSWER)
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = text_ids(tokenizer, behind, special_tokens=False) if found else []
    return next((token for token in ids if token in added), None)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool) -> list[int]:
    """Tokenize a text; a BOS that it begins with is not put there a second time."""
    # verbose=False: lengths are checked elsewhere, against the config, with an error instead of a warning.
    ids = list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(str(tokenizer.bos_token)):
        plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[1:] if len(ids) > len(plain) else ids
    return ids


def ids_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], text: str, *, special_tokens: bool
) -> list[int]:
    """Return the tokens of a text that follows a prompt.

    A SentencePiece-like tokenizer puts a space before a text that stands alone, so prompt and text are tokenized
    together. Where a token would span the boundary, which no model can draw after the prompt, the text is tokenized
    behind a character that it does not merge with; the tokens are those that decode to just this text.

    Args:
        tokenizer: of the model.
        prompt: as text; for a chat, as the template writes it.
        prompt_ids: its tokens.
        text: what follows.
        special_tokens: whether the tokenizer adds its own to the prompt.
    """
    together = text_ids(tokenizer, prompt + text, special_tokens=special_tokens)
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    alone = text_ids(tokenizer, text, special_tokens=False)
    wanted = _decoded(tokenizer, prompt_ids) + text
    for candidate in (alone, *(_behind_anchor(tokenizer, anchor, text) for anchor in _ANCHORS)):
        if candidate is not None and _decoded(tokenizer, prompt_ids + candidate) == wanted:
            return candidate
    return alone


def _behind_anchor(tokenizer: PreTrainedTokenizerBase, anchor: str, text: str) -> list[int] | None:
    before = text_ids(tokenizer, anchor, special_tokens=False)
    together = text_ids(tokenizer, anchor + text, special_tokens=False)
    return together[len(before) :] if together[: len(before)] == before else None


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(ids, **options))
