"""Single tokens as logprobs tell them: a text of their own, and the bytes that they stand for."""

import re
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token by itself. Its text has U+FFFD where its bytes are only a part of a character."""

    text: str
    data: bytes


class TokenTexts:
    """Tokens of one vocabulary; each is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, TokenText] = {}

    def of(self, token_id: int) -> TokenText:
        """Return one token; an id that the tokenizer does not have is empty."""
        known = self._known.get(token_id)
        if known is None:
            data = self._bytes(token_id)
            known = self._known[token_id] = TokenText(data.decode(errors="replace"), data)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.id_to_token(token_id) or _UNKNOWN
        if self._is_byte_level:
            return bytes(_BYTES_OF_LETTERS.get(letter, ord("?")) for letter in name)
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _bytes_of_letters() -> dict[str, int]:
    """Return what byte-level tokenizers mean by each letter: a visible one itself, others counted on from 256."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


_BYTES_OF_LETTERS = _bytes_of_letters()
