"""An answer's text, read as it is told: content, and calls of tools with ids of their own."""

import secrets
from dataclasses import dataclass

from services.gateway.tool_calls import MISTRAL, CallParser, Layout


@dataclass(frozen=True, slots=True)
class ToldCall:
    """A part of one call: id and name in the first one only, the arguments of all together are the whole."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Reading:
    """Reads one answer. Whatever is taken from it at once, all together it is the same."""

    def __init__(self, parser: CallParser, layout: Layout) -> None:
        self._parser = parser
        self._has_short_ids = layout is MISTRAL
        self.has_calls = False

    def read(self, text: str, *, is_over: bool) -> tuple[str, tuple[ToldCall, ...]]:
        """Return the content and the calls in a piece of text."""
        reads = [self._parser.push(text)] + ([self._parser.end()] if is_over else [])
        calls = tuple(
            ToldCall(piece.index, None if piece.name is None else self._draw_id(), piece.name, piece.arguments)
            for read in reads
            for piece in read.calls
        )
        self.has_calls = self.has_calls or bool(calls)
        return "".join(read.content for read in reads), calls

    def _draw_id(self) -> str:
        """Draw an id. Templates of Mistral's models refuse all that are not nine letters or digits."""
        return secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}"
