"""The tokens between two turns of the model."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.verl_async.tests.test_turns import sentencepiece_like
from verl_async.data.reply_tokens import reply_tokens
from verl_engine.contract.errors import ModelError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}hi{% endif %}"
)
TOOL = [{"role": "tool", "content": "5"}]


def written(reply: str | list[dict[str, Any]], last: str, template: str = TEMPLATE) -> list[str]:
    tokenizer = sentencepiece_like(template)
    last_token = tokenizer.convert_tokens_to_ids(last)
    assert isinstance(last_token, int)
    return list(tokenizer.convert_ids_to_tokens(list(reply_tokens(tokenizer, reply, last_token, {}))))


def test_a_text_stands_as_it_is_without_a_space_of_its_own() -> None:
    assert written("5", "=") == ["5"]


def test_messages_close_the_turn_before_them_only_where_the_model_did_not() -> None:
    behind = ["\n", "5", "<|end|>", "\n", "h", "i"]
    assert written(TOOL, "<|end|>") == behind
    assert written(TOOL, "=") == ["<|end|>", *behind]


def test_what_the_template_does_not_take_is_an_error() -> None:
    with pytest.raises(ModelError, match="the chat template does not take the reply"):
        written([{"role": "system", "content": "5"}], "=")
    with pytest.raises(ModelError, match="leaves out the model's turn"):
        written(TOOL, "=", "{{ messages[-1].content }}")


@pytest.mark.parametrize("where", ["loop.last", "m.role != 'assistant'"])
def test_a_turn_that_the_template_leaves_open_before_a_reply_is_an_error(where: str) -> None:
    """Nothing closes the turn, or only the reply has the token: what follows would begin in the wrong place."""
    end = f"{{% if {where} or loop.last %}}<|end|>{{% endif %}}"
    template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    with pytest.raises(ModelError, match=r"does not end the model's turn in '<\|end\|>' where a reply follows"):
        written(TOOL, "<|end|>", template)
    assert written(TOOL, "=", template)[0] == "5"
