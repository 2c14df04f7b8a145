"""Text preparation for `tiny-glm`: documents, a contiguous held-out split, the tokenizer and the token streams.

The input is one UTF-8 file (plain or .xz) holding, in this order, six novels of Jane Austen, Moby-Dick, the State of the
Union addresses, the King James Bible (`Ge1:1 ` verse prefixes) and Shakespeare. README.md names its public sources.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
PREFIX = "[gMASK]<sop>"
VAL_BLOCK_CHARS = 24_000
VAL_EVERY = 50
HELDOUT_CHARS = 6_500
# The word/number/punctuation pattern of GLM's and OpenAI's tokenizers: newlines stay with the punctuation before them.
PRE_TOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = str.maketrans(
    {
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EM DASH}": "--",
        "\N{EN DASH}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        "\N{BULLET}": "*",
    }
)
_AUSTEN_TITLES = (
    "EMMA",
    "MANSFIELD PARK",
    "NORTHANGER ABBEY",
    "Persuasion",
    "PRIDE AND PREJUDICE",
    "SENSE AND SENSIBILITY",
)
_ABBREVIATIONS = {"Mr.", "Mrs.", "Dr.", "St.", "No.", "Gen.", "Messrs.", "Hon.", "Capt.", "Col.", "Esq.", "vs.", "U.S."}
_VERSE = re.compile(r"^([0-9]?[A-Za-z]+)(\d+):(\d+) (.*)$")


@dataclass(frozen=True)
class Fragment:
    """A contiguous run of paragraphs of one document; `complete` says that it reaches the document's end."""

    source: str
    paragraphs: list[str]
    complete: bool

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def read_text(path: Path) -> str:
    """The file as text with ASCII quotes and dashes. Raises FileNotFoundError for a missing file."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return raw.decode("utf-8").translate(_PUNCTUATION)


def split_sentences(paragraph: str) -> list[str]:
    """Cuts after `.`, `!`, `?` (and a closing quote) before a capital or a quote, not after abbreviations or initials."""
    out: list[str] = []
    begin = 0
    for m in re.finditer(r"[.!?][\"')]?\s+(?=[A-Z\"'(])", paragraph):
        last_word = paragraph[begin : m.start() + 1].rsplit(" ", 1)[-1]
        if last_word in _ABBREVIATIONS or re.fullmatch(r"[A-Z]\.", last_word):
            continue
        out.append(paragraph[begin : m.end()].strip())
        begin = m.end()
    tail = paragraph[begin:].strip()
    return [*out, tail] if tail else out


def _group(pieces: list[str], size: int) -> list[str]:
    """Joins consecutive pieces with spaces into paragraphs of at least `size` characters (the last may be shorter)."""
    out: list[str] = []
    held: list[str] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= size:
            out.append(" ".join(held))
            held = []
    return [*out, " ".join(held)] if held else out


def _prose(lines: list[str]) -> list[str]:
    """Unwraps hard line breaks: a paragraph is what stands between blank lines; `_emphasis_` marks are dropped."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    return [p for p in (" ".join(b.replace("_", "").split()) for b in blocks) if p]


def _address(line: str) -> list[str]:
    return _group(split_sentences(" ".join(re.sub(r"\(Applause\.?\)", " ", line).split())), 420)


def _play(lines: list[str]) -> list[str]:
    """Speeches keep their verse lines; only indentation, doubled spaces and doubled blank lines go."""
    blocks = re.split(r"\n\s*\n", "\n".join(" ".join(line.split()) for line in lines))
    return [b.strip() for b in blocks if b.strip()]


def _bible(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    book, chapter = "", ""
    paragraphs: list[str] = []
    verses: list[str] = []
    for line in lines:
        m = _VERSE.match(line)
        if not m:
            continue
        if (m[1], m[2]) != (book, chapter):
            paragraphs += _group(verses, 420)
            verses = []
        if m[1] != book and paragraphs:
            yield "bible", paragraphs
            paragraphs = []
        book, chapter = m[1], m[2]
        verses.append(" ".join(m[4].split()))
    yield "bible", paragraphs + _group(verses, 420)


def documents(text: str) -> list[tuple[str, list[str]]]:
    """(source, paragraphs) per novel, address, book of the Bible and play, in file order."""
    lines = text.split("\n")
    verse_lines = [i for i, line in enumerate(lines) if _VERSE.match(line)]
    first_verse, after_bible = verse_lines[0], verse_lines[-1] + 1
    moby = lines.index("CHAPTER 1. Loomings.")
    sotu = next(i for i in range(moby, first_verse) if len(lines[i]) > 2500)
    novels = sorted(lines.index(t) for t in _AUSTEN_TITLES)
    docs = [("austen", _prose(lines[a:b])) for a, b in zip(novels, [*novels[1:], moby], strict=True)]
    docs.append(("moby-dick", _prose(lines[moby:sotu])))
    docs += [("sotu", _address(line)) for line in lines[sotu:first_verse] if line.strip()]
    docs += list(_bible(lines[first_verse:after_bible]))
    plays = lines[after_bible:]
    starts = [i for i, line in enumerate(plays) if line.strip().lower() == "by william shakespeare"]
    titles = [next(j for j in range(i - 1, -1, -1) if plays[j].strip()) for i in starts]
    docs += [("shakespeare", _play(plays[a:b])) for a, b in zip(titles, [*titles[1:], len(plays)], strict=True)]
    return docs


def split(docs: list[tuple[str, list[str]]]) -> tuple[list[Fragment], list[Fragment]]:
    """(train, held-out): of every source, each 50th block of about 24,000 characters is held out, whole and contiguous."""
    train: list[Fragment] = []
    held: list[Fragment] = []
    seen: dict[str, int] = {}
    for source, paragraphs in docs:
        run: list[str] = []
        block: list[str] = []
        for n, paragraph in enumerate(paragraphs):
            block.append(paragraph)
            last = n == len(paragraphs) - 1
            if sum(map(len, block)) < VAL_BLOCK_CHARS and not last:
                continue
            full = sum(map(len, block)) >= VAL_BLOCK_CHARS
            seen[source] = seen.get(source, 0) + full
            if full and seen[source] % VAL_EVERY == VAL_EVERY // 2:
                if run:
                    train.append(Fragment(source, run, False))
                held.append(Fragment(source, block, last))
                run = []
            else:
                run = run + block
            block = []
        if run:
            train.append(Fragment(source, run, True))
    return train, held


def heldout_slice(held: list[Fragment]) -> str:
    """About 32 KB of held-out text: the opening paragraphs of one held-out block of each source."""
    pieces: list[str] = []
    for source in dict.fromkeys(f.source for f in held):
        paragraphs = next(f.paragraphs for f in held if f.source == source)
        n = 0
        for paragraph in paragraphs:
            if n >= HELDOUT_CHARS:
                break
            pieces.append(paragraph)
            n += len(paragraph) + 2
    return "\n\n".join(pieces) + "\n"


def train_tokenizer(train: list[Fragment], vocab_size: int) -> Tokenizer:
    """Byte-level BPE on the training text; `[gMASK]<sop>` is put before every text encoded with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f.text for f in train), trainer)
    pair = [(t, tokenizer.token_to_id(t)) for t in ("[gMASK]", "<sop>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B", special_tokens=pair
    )
    return tokenizer


def prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of `[gMASK]<sop>`, with which every context begins."""
    return tokenizer.encode(PREFIX, add_special_tokens=False).ids


def encode_stream(tokenizer: Tokenizer, fragments: list[Fragment]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """All fragments as one stream, each `[gMASK]<sop> text [<|endoftext|>]`, and the offsets at which paragraphs start."""
    prefix, end = prefix_ids(tokenizer), SPECIAL_TOKENS.index("<|endoftext|>")
    ids: list[int] = []
    starts: list[int] = []
    for f in fragments:
        ids += prefix
        texts = [p + "\n\n" for p in f.paragraphs[:-1]] + [f.paragraphs[-1] + ("" if f.complete else "\n\n")]
        for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
            starts.append(len(ids))
            ids += encoded.ids
        if f.complete:
            ids.append(end)
    return np.array(ids, dtype=np.uint16), np.array(starts, dtype=np.int64)


def save_arrays(out: Path, arrays: dict[str, NDArray[np.generic]], meta: dict[str, object]) -> None:
    """Writes `<name>.npy` per array and `meta.json`."""
    for name, value in arrays.items():
        np.save(out / f"{name}.npy", value)
    (out / "meta.json").write_text(json.dumps(meta, indent=1))
