"""What a grammar lets come next, told from the output that a request has so far."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from services.worker.executor import Draw, DrawFailed
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from services.worker.grammars import Grammars, allowed_by
from services.worker.history import history_of
from services.worker.sampling import draw_tokens
from shared.ids import GatewayId, RequestId
from shared.protocol.messages import Bias, Sampling, SubmitRequest

COMPACT = {"whitespace_flexible": False}


def grammar_of(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": COMPACT})))


DIGITS = grammar_of(
    {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
)
BOOLEAN = grammar_of({"type": "boolean"})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(fake_tokenizer_files(), VOCABULARY)


def draw_after(text: str | Sequence[int], grammar: str, **sampling: Any) -> Draw:
    output = list(text.encode()) if isinstance(text, str) else list(text)
    wanted = Sampling(grammar=grammar, **sampling)
    submit = SubmitRequest(RequestId("r"), 0, GatewayId("g"), (1,), 99, wanted)
    history = history_of(submit, output, (EOS_ID,))
    return Draw(wanted, len(output) + 1, history)


def next_of(grammars: Grammars, *draws: Draw) -> list[set[int] | str | None]:
    allowed = grammars.allowed(draws)
    told: list[set[int] | str | None] = []
    for place in range(len(draws)):
        one = allowed.get(place)
        told.append(one.why if isinstance(one, DrawFailed) else None if one is None else set(np.flatnonzero(one)))
    return told


def test_what_may_come_next_depends_on_what_was_said(grammars: Grammars) -> None:
    draws = [
        draw_after("", BOOLEAN),
        draw_after("t", BOOLEAN),
        draw_after('{"a":', DIGITS),
        draw_after("true", BOOLEAN),
    ]
    assert next_of(grammars, *draws) == [{ord("t"), ord("f")}, {ord("r")}, {ord("7")}, {EOS_ID}]


def test_each_token_is_fed_once_as_the_output_grows(grammars: Grammars) -> None:
    output: list[int] = []
    wanted = Sampling(grammar=BOOLEAN)
    history = history_of(SubmitRequest(RequestId("r"), 0, GatewayId("g"), (1,), 99, wanted), output, (EOS_ID,))
    for letter in b"false":
        (may_come,) = next_of(grammars, Draw(wanted, 1, history))
        assert letter in (may_come or ())
        output.append(letter)
    assert next_of(grammars, Draw(wanted, 1, history)) == [{EOS_ID}]
    assert next_of(grammars, Draw(wanted, 1, history)) == [{EOS_ID}], "asking again changes nothing"


def test_rows_without_a_grammar_are_not_spoken_of(grammars: Grammars) -> None:
    assert next_of(grammars, Draw(Sampling(), 3), draw_after("", BOOLEAN)) == [None, {ord("t"), ord("f")}]
    assert grammars.allowed([Draw(Sampling(), 3)]) == {}


@pytest.mark.parametrize(("text", "grammar"), [("x", BOOLEAN), ("", "no grammar"), ("", grammar_of({"type": "nope"}))])
def test_one_that_cannot_be_followed_fails_alone(text: str, grammar: str, grammars: Grammars) -> None:
    draws = [draw_after("", BOOLEAN), draw_after(text, grammar), draw_after("", BOOLEAN)]
    told = next_of(grammars, *draws)
    assert told[0] == told[2] == {ord("t"), ord("f")}
    assert isinstance(told[1], str)
    assert told[1].startswith("the grammar cannot be followed: ")
    assert "\n" not in told[1]
    outcomes = draw_tokens(torch.zeros(3, VOCABULARY), draws, grammars.allowed(draws))
    assert [isinstance(outcome, DrawFailed) for outcome in outcomes] == [False, True, False]


def test_a_worker_without_a_tokenizer_fails_who_has_a_grammar_and_nobody_else() -> None:
    (failed,) = allowed_by(None, (Draw(Sampling(), 1), draw_after("", BOOLEAN))).items()
    assert failed == (1, DrawFailed("the grammar cannot be followed: this worker has no tokenizer"))


def test_a_draw_takes_the_likeliest_of_what_may_come_and_leaves_its_neighbours_alone(grammars: Grammars) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5))
    free = Draw(Sampling(temperature=0), 9)
    bound = draw_after("", BOOLEAN, temperature=0)
    before = logits.clone()
    alone = draw_tokens(logits[:1], (free,))
    drawn = draw_tokens(logits, (free, bound, free), grammars.allowed((free, bound, free)))
    assert drawn[0] == alone[0]
    assert drawn[1] == max(b"tf", key=lambda one: float(logits[1, one]))
    assert torch.equal(logits, before)


def test_a_bias_cannot_lead_out_of_a_grammar(grammars: Grammars) -> None:
    draw = draw_after("", BOOLEAN, temperature=0, biases=(Bias(ord("x"), 100.0), Bias(ord("f"), 100.0)))
    assert draw_tokens(torch.zeros(1, VOCABULARY), (draw,), grammars.allowed((draw,))) == (ord("f"),)


@pytest.mark.parametrize(("text", "token"), [("true", EOS_ID), ("12", ord("3"))])
def test_a_least_length_holds_back_the_end_only_while_something_else_may_come(
    text: str, token: int, grammars: Grammars
) -> None:
    grammar = BOOLEAN if text == "true" else str(LLMatcher.grammar_from_regex("1?2?3?"))
    draw = draw_after(text, grammar, temperature=0, min_tokens=9)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, EOS_ID] = 5.0
    assert draw_tokens(logits, (draw,), grammars.allowed((draw,))) == (token,)
