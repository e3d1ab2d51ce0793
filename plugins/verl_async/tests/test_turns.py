"""Supervised examples are the tokens that a rollout would generate: in context, and with the template's end of turn."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_async.data.examples import Conversation, Example
from verl_async.data.prompts import Prompt
from verl_async.data.tokenization import decode_response, encode_example, encode_prompt, stop_token_ids
from verl_async.data.turns import end_of_turn
from verl_async.errors import DataError
from verl_engine.contract.errors import ModelError

WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "▁", "2", "3", "+", "=", "5", "▁5", "▁2", "h", "i", "▁hi", "=5", "\n"]
CHAT = [{"role": "user", "content": "2+3="}]
ENDED = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def sentencepiece_like(template: str | None = None, *, merges: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer that puts a space before each text; with ``merges`` the piece =5 is likelier than = and 5."""
    scores = [(word, 9.0 if merges and word == "=5" else -99.0 if word == "=5" else -1.0) for word in WORDS]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106 - no password
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        additional_special_tokens=["<|end|>"],
        chat_template=template,
    )


def trained_on(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[str]:
    """Return the tokens of the loss, and check that what is before them is what a rollout is given."""
    sequence = encode_example(tokenizer, example, 99, "data.examples")
    learned = [int(token) for token, counts in zip(sequence.token_ids, sequence.loss_mask, strict=True) if counts]
    seen = encode_prompt(tokenizer, Prompt(0, "sums", example.prompt, "5", {}), 99, "data.prompts")
    assert [*seen, *learned] == sequence.token_ids.tolist()
    return [str(token) for token in tokenizer.convert_ids_to_tokens(learned)]


@pytest.mark.fault(4)
def test_a_response_has_no_space_of_its_own() -> None:
    assert trained_on(sentencepiece_like(), Example(0, "2+3=", "5")) == ["5", "</s>"]
    assert trained_on(sentencepiece_like(), Example(0, "2+3=", " 5")) == ["▁5", "</s>"]


@pytest.mark.fault(4)
def test_a_response_that_merges_with_the_prompt_is_what_can_follow_it() -> None:
    tokenizer = sentencepiece_like(merges=True)
    assert tokenizer.tokenize("2+3=5") == ["▁2", "+", "3", "=5"]
    assert trained_on(tokenizer, Example(0, "2+3=", "5")) == ["5", "</s>"]


@pytest.mark.fault(4)
@pytest.mark.parametrize("behind", ["", "\n"])
def test_a_chat_ends_as_its_template_ends_a_turn(behind: str) -> None:
    tokenizer = sentencepiece_like(ENDED.replace("<|end|>", f"<|end|>{behind}"))
    assert trained_on(tokenizer, Example(0, CHAT, "5")) == ["5", "<|end|>"]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end_of_turn(tokenizer) == end
    assert stop_token_ids(tokenizer, None) == (tokenizer.eos_token_id, end)
    assert decode_response(tokenizer, [WORDS.index("5"), WORDS.index("<|end|>")]) == "5"


@pytest.mark.fault(4)
def test_a_response_that_is_closed_already_is_not_closed_twice() -> None:
    assert trained_on(sentencepiece_like(ENDED), Example(0, CHAT, "5<|end|>")) == ["5", "<|end|>"]
    assert trained_on(sentencepiece_like(), Example(0, "2+3=", "5</s>")) == ["5", "</s>"]


@pytest.mark.fault(4)
def test_a_template_that_opens_a_turn_otherwise_than_it_writes_one() -> None:
    opened = ENDED.replace("{% endfor %}", "{% endfor %}{% if add_generation_prompt %}hi{% endif %}")
    assert trained_on(sentencepiece_like(opened), Example(0, CHAT, "5")) == ["5", "<|end|>"]


@pytest.mark.fault(4)
def test_a_template_without_an_end_of_turn_is_closed_by_the_end_of_sequence() -> None:
    tokenizer = sentencepiece_like("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert end_of_turn(tokenizer) is None
    assert trained_on(tokenizer, Example(0, CHAT, "5")) == ["5", "</s>"]
    assert end_of_turn(sentencepiece_like("{{ raise_exception('no chat is good enough') }}")) is None


TURNS = [*CHAT, {"role": "assistant", "content": "5"}, *CHAT, {"role": "assistant", "content": "hi"}]
OPENED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}=={% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}=={% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}=={% if loop.last %}+{% endif %}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}=={{ think }}{% endif %}"
)
"""Writes a thought (+) in the last turn only, and opens turns as it is told."""


def masked(template: str, trained: tuple[int, ...], think: str = "") -> str:
    """Return a conversation's tokens as text, those in the loss in brackets."""
    tokenizer = sentencepiece_like(template)
    sequence = encode_example(tokenizer, Conversation(3, TURNS, trained), 99, "data.examples", {"think": think})
    pieces = [
        f"[{token}]" if in_loss else token
        for token, in_loss in zip(
            tokenizer.convert_ids_to_tokens(sequence.token_ids.tolist()), sequence.loss_mask, strict=True
        )
    ]
    return "".join(pieces).replace("][", "").replace("<|end|>", "|").replace("▁", "")


@pytest.mark.parametrize(
    ("template", "trained", "think", "expected"),
    [
        (OPENED, (1, 3), "", "2+3=|==[5|]2+3=|==[hi|]"),
        (OPENED, (3,), "", "2+3=|==5|2+3=|==[hi|]"),
        (OPENED, (1,), "", "2+3=|==[5|]2+3=|==hi|"),
        (OPENED.replace("<|end|>", "<|end|>\n"), (1, 3), "", "2+3=|\n==[5|]\n2+3=|\n==[hi|]\n"),
        (FORGETFUL, (1, 3), "", "2+3=|==[5|]2+3=|==[+hi|]"),  # what the model itself must write is in the loss
        (FORGETFUL, (1, 3), "+", "2+3=|==[5|]2+3=|==+[hi|]"),  # and what opens its turn is not
    ],
)
def test_a_conversation_is_trained_on_turn_by_turn(
    template: str, trained: tuple[int, ...], think: str, expected: str
) -> None:
    assert masked(template, trained, think) == expected


def test_a_turn_is_what_a_rollout_would_generate_behind_the_turns_before() -> None:
    tokenizer = sentencepiece_like(OPENED)
    sequence = encode_example(tokenizer, Conversation(0, TURNS, (3,)), 99, "data.examples")
    seen = encode_prompt(tokenizer, Prompt(0, "sums", TURNS[:3], "5", {}), 99, "data.prompts")
    assert [*seen, *sequence.token_ids[sequence.loss_mask]] == sequence.token_ids.tolist()


def test_a_response_that_names_the_closing_token_ends_behind_it() -> None:
    turns = [*CHAT, {"role": "assistant", "content": "5<|end|>hi"}]
    sequence = encode_example(sentencepiece_like(OPENED), Conversation(0, turns, (1,)), 99, "data.examples")
    assert sequence.loss_mask[-1]


def test_conversations_that_a_template_cannot_write_are_refused() -> None:
    numbered = "{% for m in messages %}{{ messages | length }}{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(DataError, match=r"data.examples, row 3: the chat template writes what is before messages\[1\]"):
        masked(numbered, (1,))
    with pytest.raises(DataError, match=r"row 3: messages\[3\] does not end in '<\|end\|>'"):
        masked(OPENED.replace("<|end|>", "{% if not loop.last or messages | length < 4 %}<|end|>{% endif %}"), (3,))
    with pytest.raises(ModelError, match="the chat template ends a turn by no token of its own"):
        masked("{% for m in messages %}{{ m.content }}{% endfor %}", (1,))
    with pytest.raises(DataError, match=r"row 3: the conversation has 19 tokens; expected at most 9 .*overlong=drop"):
        encode_example(sentencepiece_like(OPENED), Conversation(3, TURNS, (3,)), 9, "data.examples")
