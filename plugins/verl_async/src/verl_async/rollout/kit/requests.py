"""Requests and their samples: where they end, how many come back, and when."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_async.rollout.interface import Generation
from verl_async.rollout.kit.bench import LONG, PROMPTS, request, require_log_probs
from verl_async.rollout.kit.models import letter_of
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from verl_async.rollout.kit.bench import Bench


def lengths(bench: Bench) -> None:
    """A sample without a stop has exactly `max_new_tokens`, also one and none, and says ``length``."""
    found = bench.stream().generate(*(request(num=num) for num in (1, 7, 40, 0)))
    got = [(len(one.token_ids), one.finish_reason) for one in found]
    require(got == [(num, "length") for num in (1, 7, 40, 0)], f"for 1, 7, 40 and 0 tokens came {got}")


def stop_tokens(bench: Bench) -> None:
    """A stop token ends its own sample, is kept as the last token, and the sample says ``stop``."""
    stream = bench.stream()
    free = stream.generate(*(request(prompt, temperature=0.0, num=20) for prompt in PROMPTS))
    stops = [one.token_ids[5] for one in free]
    asked = [
        request(prompt, temperature=0.0, num=20, stop_token_ids=(stop,))
        for prompt, stop in zip(PROMPTS, stops, strict=True)
    ]
    for whole, cut, stop in zip(free, stream.generate(*asked), stops, strict=True):
        end = whole.token_ids.index(stop) + 1
        require(
            (cut.token_ids, cut.finish_reason) == (whole.token_ids[:end], "stop"),
            f"with stop token {stop} came {cut.token_ids} ({cut.finish_reason}), not {whole.token_ids[:end]} (stop)",
        )
        require(len(cut.log_probs) == len(cut.weight_versions) == end, "the stop token has no log-prob or no version")


def stop_strings(bench: Bench) -> None:
    """The token whose text completes a stop string ends the sample and is kept."""
    stream = bench.stream()
    [free] = stream.generate(request(temperature=0.0, num=20))
    text = "".join(map(letter_of, free.token_ids))
    string = text[6:8]
    [cut] = stream.generate(request(temperature=0.0, num=20, stop_strings=("never", string)))
    end = text.index(string) + 2
    require(
        (cut.token_ids, cut.finish_reason) == (free.token_ids[:end], "stop"),
        f"with stop string {string!r} in {text!r} came {len(cut.token_ids)} tokens ({cut.finish_reason}), not {end}",
    )


def samples(bench: Bench) -> None:
    """A request gives one completion for each seed, with its index, and the request itself."""
    stream = bench.stream()
    asked = (request(PROMPTS[2], 4, 5, 6, 4), request(PROMPTS[1], 4))
    stream.submit(*asked)
    found = stream.take(5)
    stream.require_silence()
    keys = sorted((len(one.request.prompt_ids), one.index) for one in found)
    require(keys == [(1, 0), (11, 0), (11, 1), (11, 2), (11, 3)], f"samples came as {keys}")
    group = sorted((one for one in found if len(one.request.seeds) > 1), key=lambda one: one.index)
    tokens = [one.generation.token_ids for one in group]
    require(len({*map(tuple, tokens[:3])}) == 3, "samples of different seeds are equal")  # noqa: PLR2004
    require_log_probs([asked[0]] * 4, [one.generation for one in group])


def one_by_one(bench: Bench) -> None:
    """A sample comes back when it is finished, while others still run."""
    stream = bench.stream()
    stream.submit(request(PROMPTS[1], num=3), request(num=LONG))
    [first] = stream.take()
    require(stream.is_empty(), "the short sample came when the long one was finished too")
    [second] = stream.take()
    got = [len(one.generation.token_ids) for one in (first, second)]
    require(got == [3, LONG], f"samples of 3 and {LONG} tokens came with {got}")


def so_far(bench: Bench) -> None:
    """A sample goes on from the tokens it comes with: these stay, and count towards its length."""
    stream = bench.stream()
    asked = request(PROMPTS[2], 3, num=20)
    [whole] = stream.generate(asked)
    part = Generation(whole.token_ids[:8], whole.log_probs[:8], whole.weight_versions[:8])
    [rest] = stream.generate(replace(asked, so_far=(part,)))
    require(len(part.token_ids) == 8, "what was handed in is changed")  # noqa: PLR2004
    require(rest.token_ids[:8] == whole.token_ids[:8] and len(rest.token_ids) == 20, f"came {rest.token_ids}")  # noqa: PLR2004
    require_log_probs([asked], [rest])
    if "seeds" not in bench.spec.gaps:
        require(rest.token_ids == whole.token_ids, f"the stream did not go on: {rest.token_ids}, not {whole.token_ids}")


def many(bench: Bench) -> None:
    """Many requests from several threads at once, of all lengths, come back once each and are right."""
    stream = bench.stream()
    asked = [request(prompt, seed, num=2 + (5 * seed) % 17) for seed in range(16) for prompt in PROMPTS]
    threads = [threading.Thread(target=stream.submit, args=asked[start::4]) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stream.take(len(asked))
    stream.require_silence()
    came = sorted((one.request.prompt_ids, one.request.seeds) for one in found)
    require(came == sorted((one.prompt_ids, one.seeds) for one in asked), "some requests came twice, others never")
    for one in found:
        num = one.request.sampling.max_new_tokens
        require(len(one.generation.token_ids) == num, f"{len(one.generation.token_ids)} tokens, not {num}")
    require_log_probs([one.request for one in found], [one.generation for one in found])
    stats = stream.engine.stats()
    require((stats.running, stats.waiting) == (0, 0), f"when all is done, stats() says {stats}")


def sealed(bench: Bench) -> None:
    """Sealed requests give the same bits at each run, whatever was submitted beside them."""
    stream = bench.stream()
    batch = [request(prompt, seed, num=6 + 3 * seed) for seed in range(3) for prompt in PROMPTS]
    alone = stream.generate(*batch, sealed=True)
    stream.submit(request(num=30), request(PROMPTS[1], num=17))
    stream.submit(*batch, sealed=True)
    stream.submit(request(PROMPTS[2], num=9))
    found = {one.request.request_id: one.generation for one in stream.take(len(batch) + 3)}
    again = [found[key] for key in sorted(found, key=int)][2:-1]
    require([one.token_ids for one in again] == [one.token_ids for one in alone], "the tokens differ beside others")
    require([one.log_probs for one in again] == [one.log_probs for one in alone], "the bits differ beside others")


def next_turn(bench: Bench) -> None:
    """With an affinity key the next turn of a conversation reads only what is new, and its log-probs are right."""
    stream = bench.stream()
    turn = request(PROMPTS[2], num=20, affinity_key="conversation")
    [answer] = stream.generate(turn)
    turn = replace(turn, prompt_ids=(*turn.prompt_ids, *answer.token_ids, 7, 8))
    before = stream.engine.stats().read_tokens
    found = stream.generate(turn)
    num_read = stream.engine.stats().read_tokens - before
    require(num_read < len(turn.prompt_ids) // 2, f"{num_read} of the {len(turn.prompt_ids)} tokens were read again")
    require_log_probs([turn], found)


def group_prompt(bench: Bench) -> None:
    """The prompt of a group is read once."""
    stream = bench.stream()
    before = stream.engine.stats().read_tokens
    stream.generate(request(PROMPTS[2], *range(100, 108)))
    num_read = stream.engine.stats().read_tokens - before
    require(num_read == len(PROMPTS[2]), f"{num_read} tokens were read for 8 samples of {len(PROMPTS[2])}")
