"""The official client against a real server, feature by feature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.live import MODEL, LiveServer, live_server, make_engine
from uncast.engine.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "the latent cache"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: object = "the latent", **options: object) -> openai.types.Completion:
    options = {"temperature": 0, "max_tokens": 12, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)  # type: ignore[call-overload,no-any-return]


def chat(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    options = {"temperature": 0, "max_completion_tokens": 12, **options}
    return client.chat.completions.create(model=MODEL, messages=CHAT, **options)  # type: ignore[call-overload,no-any-return]


def extended(client: openai.OpenAI, **extra: object) -> str:
    return complete(client, temperature=2, seed=5, extra_body=extra).choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 96  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_and_its_usage(client: openai.OpenAI, folder: Path) -> None:
    answer = complete(client)
    prompt = Tokenizer(folder).encode("the latent")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.total_tokens == len(prompt) + 12
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None


def test_prompts_as_text_texts_ids_and_lists_of_ids(client: openai.OpenAI, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    texts = ["the latent", "is read"]
    ids = [tokenizer.encode(text) for text in texts]
    alone = [complete(client, text).choices[0].text for text in texts]
    assert complete(client, ids[0]).choices[0].text == alone[0]
    for prompts in (texts, ids):
        answer = complete(client, prompts, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 48


def test_the_default_length_of_a_completion_is_16(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the latent", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_streamed_completions_are_the_same_text(client: openai.OpenAI) -> None:
    whole = complete(client, ["the latent", "is read"])
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in complete(client, ["the latent", "is read"], stream=True):
        assert chunk.usage is None and chunk.object == "text_completion"  # type: ignore[attr-defined]
        for choice in chunk.choices:  # type: ignore[attr-defined]
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: whole.choices[0].text, 1: whole.choices[1].text} and texts[0]
    assert reasons == {0: "length", 1: "length"}


def test_a_chat(client: openai.OpenAI, folder: Path) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    rendered = Tokenizer(folder).chat(CHAT)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(rendered)
    assert answer.choices[0].message.content == complete(client, rendered).choices[0].text


def test_a_chat_without_a_limit_runs_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == 96


def test_messages_of_parts_and_roles(client: openai.OpenAI) -> None:
    def text(*messages: dict[str, object]) -> str | None:
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    parts = [{"type": "text", "text": "the latent"}, {"type": "text", "text": " cache"}]
    assert text({"role": "user", "content": parts}) == text({"role": "user", "content": "the latent cache"})
    question = {"role": "user", "content": "a"}
    assert text({"role": "developer", "content": "be"}, question) == text({"role": "system", "content": "be"}, question)
    turns = [question, {"role": "assistant", "content": None, "refusal": None}, question]
    assert text(*turns)


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    whole = chat(client, n=2)
    stream = chat(client, n=2, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)  # type: ignore[arg-type]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:  # type: ignore[attr-defined]
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}  # type: ignore[attr-defined]
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices]  # type: ignore[attr-defined]
    assert roles.count("assistant") == 2 and roles[:2] == ["assistant", "assistant"]
    last = chunks[-1]
    assert last.choices == [] and whole.usage is not None  # type: ignore[attr-defined]
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24  # type: ignore[attr-defined]
    assert all(chunk.usage is None for chunk in chunks[:-1])  # type: ignore[attr-defined]


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    mark = text[3:5]
    for stop in (mark, [mark], ["never in it", mark, "nor this", "nor that"]):
        answer = complete(client, max_tokens=40, stop=stop).choices[0]
        assert answer.text == text[: text.index(mark)] and answer.finish_reason == "stop"
        streamed = complete(client, max_tokens=40, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text  # type: ignore[attr-defined]


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int = 1) -> list[str]:
        return [choice.text for choice in complete(client, temperature=1.5, seed=seed, n=n).choices]

    assert texts(3) == texts(3) != texts(4)
    assert texts(-(2**63)) == texts(-(2**63))
    several = texts(3, n=3)
    assert len(set(several)) == 3 and several[0] == texts(3)[0]


def test_sampling_parameters_reach_the_sampler(client: openai.OpenAI) -> None:
    greedy = complete(client).choices[0].text
    assert complete(client, temperature=2, top_p=1e-9).choices[0].text == greedy
    assert extended(client, top_k=1) == extended(client, min_p=1) == greedy
    assert extended(client, top_k=-1) == extended(client, top_k=0) != greedy
    assert extended(client, repetition_penalty=10) != extended(client)


def test_logit_bias_and_penalties(client: openai.OpenAI, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    token = tokenizer.encode("cache")[0]
    forced = complete(client, logit_bias={str(token): 100}).choices[0].text
    assert forced == tokenizer.decode([token] * 12)
    # A bias of 12 wins until the penalty, 2 for each time, has eaten it: the forced token cannot go on for ever.
    eased = complete(client, logit_bias={str(token): 12}, max_tokens=20, frequency_penalty=2).choices[0].text
    assert eased.startswith(tokenizer.decode([token])) and eased != tokenizer.decode([token] * 20)
    first = complete(client, max_tokens=20).choices[0].text
    assert complete(client, presence_penalty=2, max_tokens=20).choices[0].text != first


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=3).choices[0]
    found = answer.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    for token, logprob, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        # Greedy: the chosen token is the likeliest. Tokens with the same text share an entry.
        assert token in best and logprob == max(best.values()) < 0 and len(best) <= 3
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert token.startswith("bytes:") or answer.text[offset:].startswith(token)
    without = complete(client, logprobs=0).choices[0].logprobs
    assert without is not None and without.top_logprobs is None and without.token_logprobs == found.token_logprobs
    streamed = complete(client, logprobs=3, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]  # type: ignore[attr-defined]
    assert [t for piece in pieces if piece for t in piece.tokens] == found.tokens
    assert [o for piece in pieces if piece for o in piece.text_offset] == found.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=20).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content is not None
    assert len(answer.logprobs.content) == 12
    raw = b"".join(bytes(entry.bytes or ()) for entry in answer.logprobs.content)
    assert raw.decode("utf-8", "replace").startswith(answer.message.content or "?")
    for entry in answer.logprobs.content:
        assert len(entry.top_logprobs) == 20 and entry.logprob == entry.top_logprobs[0].logprob
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1
    plain = chat(client, logprobs=True).choices[0]
    assert plain.logprobs is not None and plain.logprobs.content is not None
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[]] * 12
    streamed = chat(client, logprobs=True, stream=True)
    entries = [e for c in streamed for choice in c.choices if choice.logprobs for e in choice.logprobs.content]  # type: ignore[attr-defined]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in plain.logprobs.content]
    assert chat(client).choices[0].logprobs is None


def test_echo(client: openai.OpenAI, folder: Path) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == "the latent" + text
    ids = Tokenizer(folder).encode("the latent")
    assert complete(client, ids, echo=True).choices[0].text == "the latent" + text
    streamed = complete(client, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "the latent" + text  # type: ignore[attr-defined]


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    noops = {"user": "u", "extra_body": {"metadata": {"a": "b"}, "store": True}}
    assert complete(client, **noops).choices[0].text == complete(client).choices[0].text
    plain = chat(client, store=False, metadata={"a": "b"}, user="u", response_format={"type": "text"})
    assert plain.choices[0].message.content == chat(client).choices[0].message.content


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "is read as it is stored " * 8
    complete(client, prompt)
    answer = complete(client, prompt, stream=True, stream_options={"include_usage": True})
    usage = list(answer)[-1].usage  # type: ignore[call-overload]
    assert usage.prompt_tokens_details.cached_tokens >= 16
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_ignore_eos_goes_on_after_the_end_token(client: openai.OpenAI, server: LiveServer) -> None:
    end = sorted(server.engine.engine.runner.model.config.stop_token_ids)
    assert end, "the tiny model has an end token"
    bias = {str(end[0]): 100}
    ended = complete(client, logit_bias=bias)
    assert ended.choices[0].finish_reason == "stop" and ended.usage is not None and ended.usage.completion_tokens <= 1
    going_on = complete(client, logit_bias=bias, extra_body={"ignore_eos": True})
    assert going_on.choices[0].finish_reason == "length" and going_on.usage is not None
    assert going_on.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"logprobs": 6}, "logprobs"),
        ({"logit_bias": {"282": 1}}, "logit_bias"),
        ({"max_tokens": 95}, "max_tokens"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"tools": []}}, "tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_the_client_sees_which_field_is_at_fault(client: openai.OpenAI, options: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert caught.value.param == param and caught.value.type == "invalid_request_error" and param in str(caught.value)


def test_an_api_key_is_needed_where_one_is_set(folder: Path) -> None:
    with live_server(folder, make_engine(folder), api_key="right") as locked:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="right") as client:
            assert client.models.list().data and complete(client).choices
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                complete(client)
            assert caught.value.code == "invalid_api_key"
