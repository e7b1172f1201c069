"""Objects of clients that are handed on as they are: bounded before anything walks through them. Pure."""

from shared.errors import InvalidParameter

MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_CHARACTERS = 256 * 1024


def check_nested(value: object, param: str) -> None:
    """Raise InvalidParameter if a JSON value is too deep or too large. Stops where it becomes so."""
    left: list[tuple[object, int]] = [(value, 1)]
    values, characters = 0, 0
    while left:
        inner, depth = left.pop()
        values += 1
        if isinstance(inner, str):
            characters += len(inner)
        elif isinstance(inner, dict | list):
            if depth > MAX_DEPTH:
                raise InvalidParameter(f"{param}: at most {MAX_DEPTH} levels deep", param=param)
            if values + len(inner) > MAX_VALUES:
                raise InvalidParameter(f"{param}: at most {MAX_VALUES} values", param=param)
            if isinstance(inner, dict):
                characters += sum(map(len, inner))
                inner = list(inner.values())
            left += [(one, depth + 1) for one in inner]
        if values > MAX_VALUES or characters > MAX_CHARACTERS:
            raise InvalidParameter(f"{param}: at most {MAX_VALUES} values and {MAX_CHARACTERS} characters", param=param)
