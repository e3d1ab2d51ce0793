"""Prompts and examples as tokens, with a tiny tokenizer: one token a character."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl_async.data.examples import Example
from verl_async.data.prompts import Prompt
from verl_async.data.tokenization import (
    check_settings,
    check_vocabulary,
    decode_response,
    encode_example,
    encode_prompt,
    stop_token_ids,
)
from verl_async.errors import DataError
from verl_engine.contract.errors import ConfigError, ModelError

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
PAD, BOS, EOS, USER, ASSISTANT = range(5)
CHARACTERS = "0123456789+= "
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(
    *, template: str | None = TEMPLATE, text: str = "<bos> $A", eos: str | None = "<eos>"
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=text, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        eos_token=eos,
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=template,
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(VOCABULARY[character] for character in text)


def prompt_of(value: str | list[dict[str, Any]], index: int = 0) -> Prompt:
    return Prompt(index, "addition", value, "3", {})


CHAT = [{"role": "user", "content": "1+2="}]


def test_a_text_gets_the_tokenizers_own_special_tokens() -> None:
    assert encode_prompt(make_tokenizer(), prompt_of("1+2="), 8, "data.prompts") == (BOS, *ids("1+2="))
    assert encode_prompt(make_tokenizer(text="$A"), prompt_of("1+2="), 8, "data.prompts") == ids("1+2=")


def test_a_chat_goes_through_the_template_with_the_generation_prompt() -> None:
    # <bos> comes from the template, once.
    expected = (BOS, USER, *ids("1+2="), ASSISTANT)
    assert encode_prompt(make_tokenizer(), prompt_of(CHAT), 8, "data.prompts") == expected


def test_the_longest_prompt_fits_and_a_longer_one_names_its_row() -> None:
    tokenizer = make_tokenizer()
    assert len(encode_prompt(tokenizer, prompt_of("1+2="), 5, "data.prompts")) == 5
    with pytest.raises(DataError, match=r"data.prompts, row 9: the prompt has 5 tokens; expected at most 4"):
        encode_prompt(tokenizer, prompt_of("1+2=", index=9), 4, "data.prompts")


@pytest.mark.parametrize("prompt", ["1+2=", CHAT])
def test_an_example_trains_on_response_and_end_only(prompt: str | list[dict[str, Any]]) -> None:
    tokenizer = make_tokenizer()
    sequence = encode_example(tokenizer, Example(0, prompt, "3 3"), 20, "data.examples")
    seen = encode_prompt(tokenizer, prompt_of(prompt), 20, "data.prompts")
    assert tuple(sequence.token_ids) == (*seen, *ids("3 3"), EOS)
    assert sequence.loss_mask.tolist() == [False] * len(seen) + [True] * 4
    assert sequence.token_ids.dtype == "int64"


def test_an_example_that_is_too_long_names_its_row() -> None:
    tokenizer = make_tokenizer()
    assert len(encode_example(tokenizer, Example(0, "1+2=", "3"), 7, "data.examples")) == 7
    with pytest.raises(DataError, match=r"data.examples, row 4: .* have 5 \+ 2 = 7 tokens; expected at most 6"):
        encode_example(tokenizer, Example(4, "1+2=", "3"), 6, "data.examples")


def test_a_prompt_without_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data.prompts, row 2: the prompt '' has no tokens"):
        encode_prompt(make_tokenizer(text="$A"), prompt_of("", index=2), 8, "data.prompts")


def test_a_tokenizer_that_closes_each_text_is_refused() -> None:
    closing = make_tokenizer(text="$A <eos>")
    with pytest.raises(ModelError, match="set add_eos_token to false"):
        encode_prompt(closing, prompt_of("1+2="), 8, "data.prompts")
    # Chats are not touched by it, and a text may end so if it says so itself.
    assert encode_prompt(closing, prompt_of(CHAT), 8, "data.prompts")[-1] == ASSISTANT
    assert encode_prompt(make_tokenizer(), prompt_of("1<eos>"), 8, "data.prompts") == (BOS, *ids("1"), EOS)


def test_a_chat_needs_a_template_that_takes_it() -> None:
    with pytest.raises(ModelError, match=r"data.prompts, row 0: .* has no chat template; add chat_template.jinja"):
        encode_prompt(make_tokenizer(template=None), prompt_of(CHAT), 8, "data.prompts")
    with pytest.raises(DataError, match="row 3: the chat template refuses the prompt: no such role"):
        encode_prompt(make_tokenizer(), prompt_of([{"role": "judge", "content": "1"}], index=3), 8, "data.prompts")


@pytest.mark.fault(26)
def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    for prompt in ("1+2=", "<bos>1+2="):
        assert encode_prompt(make_tokenizer(), prompt_of(prompt), 8, "data.prompts") == (BOS, *ids("1+2="))
        sequence = encode_example(make_tokenizer(), Example(0, prompt, "3"), 8, "data.examples")
        assert tuple(sequence.token_ids) == (BOS, *ids("1+2=3"), EOS)
    plain = make_tokenizer(text="$A")
    assert encode_prompt(plain, prompt_of("<bos><bos>1"), 8, "data.prompts") == (BOS, BOS, *ids("1"))


@pytest.mark.fault(9)
def test_a_token_beyond_the_model_s_vocabulary_names_row_and_sizes() -> None:
    check_vocabulary(make_tokenizer(), ids("1+2="), len(VOCABULARY), "data.prompts, row 3")
    check_vocabulary(make_tokenizer(), ids("1+2="), None, "data.prompts, row 3")
    with pytest.raises(DataError, match=r"token 16 .* beyond the model's vocab_size=16, .* has 18 tokens"):
        check_vocabulary(make_tokenizer(), ids("1+2="), 16, "data.prompts, row 3")


def test_an_example_needs_an_end_token() -> None:
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        encode_example(make_tokenizer(eos=None), Example(0, "1+2=", "3"), 8, "data.examples")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config() -> None:
    tokenizer = make_tokenizer()
    assert stop_token_ids(tokenizer, None) == (EOS,)
    assert stop_token_ids(tokenizer, EOS) == (EOS,)
    assert stop_token_ids(tokenizer, 0) == (0, EOS)
    assert stop_token_ids(tokenizer, [7, EOS, 5]) == (EOS, 5, 7)
    assert stop_token_ids(make_tokenizer(eos=None), None) == ()


def test_a_response_is_decoded_without_special_tokens() -> None:
    tokenizer = make_tokenizer()
    assert decode_response(tokenizer, [*ids("3 =3"), EOS]) == "3 =3"
    assert decode_response(tokenizer, ()) == ""


THINKS = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>{% if think is false %}+{% endif %}{% endif %}")


def test_arguments_reach_the_template() -> None:
    tokenizer = make_tokenizer(template=THINKS)
    assert encode_prompt(tokenizer, prompt_of(CHAT), 8, "data.prompts", {"think": False})[-1:] == ids("+")
    assert encode_prompt(tokenizer, prompt_of(CHAT), 8, "data.prompts", {"think": True})[-1] == ASSISTANT
    tools = "{% for tool in tools %}{{ tool.name }}{% endfor %}"
    tokenizer = make_tokenizer(template=tools + TEMPLATE)
    prompt = encode_prompt(tokenizer, prompt_of(CHAT), 9, "data.prompts", {"tools": [{"name": "7"}]})
    assert prompt[:2] == (*ids("7"), BOS)
    example = encode_example(tokenizer, Example(0, CHAT, "3"), 99, "data.examples", {"tools": [{"name": "7"}]})
    assert example.token_ids[:2].tolist() == [*ids("7"), BOS]


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    check_settings(make_tokenizer(template=THINKS), {"think": True})
    for tokenizer in (make_tokenizer(), make_tokenizer(template=None)):
        with pytest.raises(ConfigError, match=r"data.chat_template.think: the model's chat template does not read it"):
            check_settings(tokenizer, {"think": True})
