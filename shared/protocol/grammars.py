"""What a grammar may cost: the gateway refuses by the same bounds by which a worker gives up."""

from typing import Final, TypedDict

MAX_GRAMMAR_BYTES: Final = 64 * 1024
"""It travels with every submission, plan and snapshot of its request."""


class GrammarLimits(TypedDict):
    """Bounds by the names that llguidance gives them; what it counts is work, so the same on every machine."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    max_lexer_states: int
    max_grammar_size: int
    max_items_in_row: int


_MAX_SYMBOLS: Final = 16_000
"""Of a grammar: that of 2,000 properties which may be left out, made in 0.6 s; making it takes the square of that."""

GRAMMAR_LIMITS: Final[GrammarLimits] = {
    # a fifth, a quarter and a fifth of llguidance's own: with those, 200 bytes of nested repetitions took 1.2 s and
    # 180 MB for one mask, while no schema of real use comes near these
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": _MAX_SYMBOLS,
    # all that may come next at one place is a part of the grammar: what was not refused as too large never is here
    "max_items_in_row": _MAX_SYMBOLS,
}
