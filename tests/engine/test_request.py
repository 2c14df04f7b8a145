"""Requests out of range name the field, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from uncast.engine.request import Request, RequestError


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": []}, "the prompt is empty: at least one token is needed"),
        ({"max_tokens": 0}, "max_tokens is 0: at least 1 is needed"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"stop": "abc"}, "stop is one string: a sequence of strings is needed"),
        ({"stop": ["x"] * 17}, "stop has 17 strings: at most 16 are allowed"),
        ({"prompt": [1.5]}, "the prompt holds 1.5: token ids are integers"),
        ({"prompt": [1, "a"]}, "the prompt holds 'a': token ids are integers"),
        ({"prompt": [True]}, "the prompt holds True: token ids are integers"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: an integer of at least 1 is needed"),
        ({"max_tokens": float("nan")}, "max_tokens is nan: an integer"),
        ({"max_tokens": "3"}, "max_tokens is '3': an integer"),
        ({"stop": [b"x"]}, "stop holds b'x': strings are needed"),
        ({"stop": ["a\ud800"]}, "a stop string is not valid Unicode: character 1 is a lone surrogate"),
        ({"stop_token_ids": [None]}, "stop_token_ids holds None: token ids are integers"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids is \[3, -1\]: token ids are not negative"),
    ],
)
def test_bad_fields(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        Request(**{"prompt": [1], **fields})


def test_every_request_gets_its_own_id() -> None:
    assert Request([1]).request_id != Request([1]).request_id
