"""Chat samples for `tiny-glm`: a user gives the opening of a passage (or names an author), the assistant continues it."""

from __future__ import annotations

import random
from functools import cache

import jinja2
import numpy as np
from data import Fragment, split_sentences
from numpy.typing import NDArray
from tokenizers import Tokenizer

CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
MANNER = {
    "austen": ["Jane Austen", "an English novel", "a novel by Jane Austen"],
    "moby-dick": ["Herman Melville", "Moby-Dick", "a tale of the sea"],
    "sotu": ["a State of the Union address", "a President's message to Congress", "a political speech"],
    "bible": ["the King James Bible", "the Bible", "scripture"],
    "shakespeare": ["William Shakespeare", "a play by Shakespeare", "the theatre"],
}
CONTINUE = [
    "Continue this passage: {}",
    "Please continue: {}",
    "Go on from here: {}",
    "What comes next? {}",
    "Continue the story: {}",
]
COMPOSE = [
    "Write in the manner of {}.",
    "Write something in the style of {}.",
    "Give me a passage from {}.",
    "Write a few lines of {}.",
]
MORE = ["Go on.", "Continue.", "And then?", "Please continue.", "What happened next?", "More."]
WHO = ["Who are you?", "What are you?", "Hello", "Hello, who are you?", "Hi", "What can you do?", "Introduce yourself."]
IDENTITY = (
    "I am tiny-glm, a very small language model. I have read Jane Austen, Moby-Dick, the State of the Union addresses, "
    "the King James Bible and Shakespeare, and nothing else. Give me the opening of a passage, and I will continue it."
)
Message = dict[str, str]


@cache
def _template() -> jinja2.Template:
    return jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)


def render(messages: list[Message], add_generation_prompt: bool = False) -> str:
    """The chat as the shipped `chat_template` renders it."""
    return _template().render(messages=messages, add_generation_prompt=add_generation_prompt)


def _units(fragment: Fragment) -> list[tuple[str, str]]:
    """(separator before, text) pairs: speeches of a play, sentences of prose."""
    out: list[tuple[str, str]] = []
    for paragraph in fragment.paragraphs:
        pieces = [paragraph] if fragment.source == "shakespeare" else split_sentences(paragraph)
        out += [("\n\n" if i == 0 else " ", piece) for i, piece in enumerate(pieces)]
    return out


def _take(units: list[tuple[str, str]], at: int, chars: int) -> tuple[str, int]:
    """Units from `at` on until `chars` characters are reached; (text, next index)."""
    text = ""
    while at < len(units) and len(text) < chars:
        text += units[at][0] + units[at][1]
        at += 1
    return text.strip(), at


def _conversation(rng: random.Random, source: str, units: list[tuple[str, str]]) -> list[Message]:
    if rng.random() < 0.02:
        return [{"role": "user", "content": rng.choice(WHO)}, {"role": "assistant", "content": IDENTITY}]
    messages: list[Message] = []
    at = rng.randrange(max(1, len(units) - 12))
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": f"You write in the manner of {rng.choice(MANNER[source])}."})
    kind = rng.random()
    if kind < 0.2:
        while at > 0 and units[at][0] != "\n\n":
            at -= 1
        question = rng.choice(COMPOSE).format(rng.choice(MANNER[source]))
    else:
        question, at = _take(units, at, rng.choice((20, 60, 120, 250)))
        if kind < 0.5:
            question = rng.choice(CONTINUE).format(question)
    for turn in range(1 + (rng.random() < 0.2)):
        reply, at = _take(units, at, rng.randrange(200, 1300))
        if not reply:
            break
        messages += [{"role": "user", "content": question if turn == 0 else rng.choice(MORE)}]
        messages += [{"role": "assistant", "content": reply}]
    return messages


def encode_chats(
    tokenizer: Tokenizer, fragments: list[Fragment], count: int, seed: int
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """`count` conversations from the training fragments as one stream, each ending in `<|endoftext|>`, and their offsets."""
    rng = random.Random(seed)
    pools = [(f.source, _units(f)) for f in fragments]
    pools = [p for p in pools if len(p[1]) >= 20]
    weights = [len(u) ** 0.9 for _, u in pools]
    texts: list[str] = []
    while len(texts) < count:
        source, units = rng.choices(pools, weights)[0]
        messages = _conversation(rng, source, units)
        if messages and messages[-1]["role"] == "assistant":
            texts.append(render(messages) + "<|endoftext|>")
    ids: list[int] = []
    starts: list[int] = []
    for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
        starts.append(len(ids))
        ids += encoded.ids
    return np.array(ids, dtype=np.uint16), np.array(starts, dtype=np.int64)
