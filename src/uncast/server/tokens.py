"""A token's text and bytes, for log-probabilities."""

from __future__ import annotations

import codecs
import re

from uncast.engine.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for bytes (GPT-2, `bytes_to_unicode`): character -> byte.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenTexts:
    """Texts and bytes of single tokens, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; part of a character, perhaps."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find(token_id)
        return known

    def text(self, token_id: int) -> str:
        """The token's text; of a token that is no whole character, its bytes as `bytes:\\xe2\\x80`."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if piece is not None and "\ufffd" in text:
            match = _BYTE_PIECE.fullmatch(piece)
            if match:
                return bytes([int(match[1], 16)])
            if all(character in _ALPHABET for character in piece):
                return bytes(_ALPHABET[character] for character in piece)
        if piece is not None and piece.startswith(_SPACE_PIECE) and not text.startswith(" "):
            text = " " + text  # decoders strip the space that begins a text
        return text.encode("utf-8")


class TextOffsets:
    """Where each token's text begins, in characters, as tokens arrive."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, raw: bytes) -> int:
        """The offset of the token with these bytes; of a token within a character, that of the character."""
        unfinished = bool(self._decoder.getstate()[0])
        goes_on = bool(raw) and 0x80 <= raw[0] < 0xC0
        offset = self._offset
        self._offset += len(self._decoder.decode(raw))
        # Bytes that were no character after all are shown as one replacement character, before this token's text.
        return offset + (unfinished and bool(raw) and not goes_on)
