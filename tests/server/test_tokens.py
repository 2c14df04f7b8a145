"""Texts and bytes of single tokens, for both kinds of vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from uncast.engine.tokenizer import Tokenizer
from uncast.server.tokens import TextOffsets, TokenTexts

TEXT = "the cache é 🙂\n"


def sentencepiece_folder(folder: Path) -> Path:
    """A vocabulary as Llama's: spaces as U+2581, bytes as <0x0A>, the first space of a text stripped."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers

    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "t",
        "h",
        "e",
        "\u2581t",
        "\u2581th",
        "\u2581the",
    ]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    fast = Fast(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["byte level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path, folder: Path) -> Tokenizer:
    return Tokenizer(folder if request.param == "byte level" else sentencepiece_folder(tmp_path))


def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    joined = b"".join(texts.raw(token) for token in ids)
    assert joined.decode().removeprefix(" ") == TEXT and len(ids) > 8
    assert "".join(map(texts.text, tokenizer.encode("the"))).strip() == "the"


def test_a_part_of_a_character_is_shown_as_bytes(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    parts = [texts.text(token) for token in tokenizer.encode("🙂")][-4:]
    assert parts == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]


def test_special_tokens_and_ids_without_a_piece_have_a_text(folder: Path) -> None:
    texts = TokenTexts(Tokenizer(folder))
    assert texts.text(100_000) == "" and texts.raw(100_000) == b""


def test_offsets_count_characters() -> None:
    def offsets(*pieces: bytes) -> list[int]:
        counter = TextOffsets()
        return [counter.push(piece) for piece in pieces]

    assert offsets(b"ab", b"", b" c", b"d") == [0, 2, 2, 4]
    assert offsets(b"a", "🙂".encode()[:2], "🙂".encode()[2:], b"z") == [0, 1, 1, 2]
    # Bytes that never become a character are one replacement character before what follows.
    assert offsets(b"a", b"\xe2", b"&", b"z") == [0, 1, 2, 3]
    assert offsets(b"\xab", b"&") == [0, 1]
