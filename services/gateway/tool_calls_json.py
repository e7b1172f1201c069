"""Where a JSON value ends in text that comes in pieces. Pure."""

_CLOSERS = {"{": "}", "[": "]"}
_BETWEEN = frozenset(" \t\r\n,:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
"""What may stand outside of strings. Looser than JSON: words of other languages are for whoever reads the value."""


class Brackets:
    """Follows the brackets of one JSON value. What is between them is not checked, but for what JSON never has."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    @property
    def depth(self) -> int:
        """Return how many brackets are open."""
        return len(self._closers)

    def step(self, character: str) -> bool:
        """Take the next character; False, and nothing has changed, if it cannot stand there."""
        if self._is_in_string:
            self._step_in_string(character)
        elif character == '"':
            self._is_in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif self._closers and character == self._closers[-1]:
            self._closers.pop()
        else:
            return character in _BETWEEN
        return True

    def _step_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
