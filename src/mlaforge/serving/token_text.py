"""Text and bytes of single tokens, as reported with log probabilities."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Bytes and text of token ids of one tokenizer; ids outside the vocabulary are empty."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._added = set(tokenizer.get_added_vocab().values())
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = (json.loads(backend.to_str()).get("decoder") or {}) if backend is not None else {}
        kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part}
        # Byte-level BPE represents bytes by printable characters: character -> byte.
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._alphabet = byte_of if "ByteLevel" in kinds else None
        self._cache: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of a token in the UTF-8 text, which may be a part of a character."""
        raw = self._cache.get(token_id)
        if raw is None:
            raw = self._cache[token_id] = self._decode(token_id)
        return raw

    def _decode(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return str(token).encode("utf-8", errors="replace")
        if self._alphabet is not None and all(c in self._alphabet for c in token):
            return bytes(self._alphabet[c] for c in token)
        if byte := _BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return str(token).replace("▁", " ").encode("utf-8", errors="replace")

    def text(self, token_id: int) -> str:
        """Return a token's text; OpenAI's notation `bytes:\\xe2\\x82` for a part of a character."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Character offsets of consecutive tokens in their text."""

    def __init__(self, tokens: TokenText, skip_special_tokens: bool) -> None:
        self._tokens, self._skip = tokens, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_id: int) -> int:
        """Return the offset of the next token, `token_id`, and advance past it."""
        offset = self._offset
        if not (self._skip and self._tokens.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._tokens.raw(token_id)))
        return offset
