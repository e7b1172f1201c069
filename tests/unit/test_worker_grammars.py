"""Answers that follow grammars: on the fake executor, whose ids below 256 are bytes, through the real ledger."""

import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from msgspec.structs import replace

from services.gateway.grammars import WHITESPACE
from services.worker.executor import Draw, DrawFailed, Drawn, Outcome
from services.worker.fake_executor import FakeExecutor
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from services.worker.grammars import Grammars, Guided, without
from services.worker.guide import Guide
from services.worker.history import History
from services.worker.plan_draft import Model
from services.worker.residents import Accepted, Ledger
from services.worker.sampling import draw_tokens
from shared.ids import RequestId
from shared.protocol.messages import Sampling, StepPlan, SubmitRequest
from shared.runtime.clock import monotonic
from shared.scheduling.limits import Limits
from tests.conductor import Conductor
from tests.schemas import SCHEMAS, fits
from tests.unit.worker_plans import WORKER, new, piece, submit

FILES = fake_tokenizer_files()
PROMPT = tuple(b"say")


def grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})


def guided(text: str = "", *, follows: str, prompt: bytes = b"say", awaits: int | None = None) -> Guided:
    """Return a row that draws behind a text of its answer."""
    request = submit(prompt=tuple(prompt), sampling=Sampling(grammar=follows))
    return Guided(0, Guide(request, tuple(text.encode())), len(prompt) + len(text.encode()), awaits)


def allowed(grammars: Grammars, one: Guided, before: Sequence[Outcome] = ()) -> set[int]:
    mask = grammars.masks([one], before)[0]
    assert not isinstance(mask, DrawFailed), mask.why
    assert mask.shape == (VOCABULARY,)
    return set(np.flatnonzero(mask).tolist())


def why(grammars: Grammars, one: Guided) -> str:
    mask = grammars.masks([one], ())[0]
    assert isinstance(mask, DrawFailed)
    return mask.why


YES_OR_NO = LLMatcher.grammar_from_lark('start: "yes" | "no"')


def test_a_mask_has_what_continues_the_grammar_and_the_end_only_where_it_may_end() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    for text, expected in (("", b"yn"), ("y", b"e"), ("ye", b"s"), ("n", b"o")):
        assert allowed(grammars, guided(text, follows=YES_OR_NO)) == set(expected), text
    for text in ("yes", "no"):
        assert allowed(grammars, guided(text, follows=YES_OR_NO)) == {EOS_ID}


def test_every_token_is_told_once_whether_the_step_before_has_drawn_it_or_the_output_has_it() -> None:
    output: list[int] = []
    guide = Guide(submit(sampling=Sampling(grammar=YES_OR_NO)), output)
    assert guide.untold(3, None) == []
    assert guide.untold(4, ord("y")) == [ord("y")]  # not in the output yet
    output.extend(b"y")
    assert guide.untold(4, ord("y")) == []
    output.extend(b"e")
    assert guide.untold(5, ord("e")) == [ord("e")]  # in it already
    output.extend(b"s")
    assert guide.untold(6, None) == [ord("s")]


def test_a_row_that_awaits_its_token_is_masked_behind_it() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    ahead = guided(follows=YES_OR_NO, awaits=1)
    ahead = Guided(0, ahead.guide, ahead.position + 1, 1)
    assert allowed(grammars, ahead, (0, ord("n"))) == {ord("o")}


def test_a_position_that_comes_again_is_masked_as_it_was() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    request = submit(sampling=Sampling(grammar=YES_OR_NO))
    guide = Guide(request, tuple(b"ye"))
    for position, expected in ((5, b"s"), (4, b"e"), (5, b"s"), (3, b"yn")):
        assert allowed(grammars, Guided(0, guide, position, None)) == set(expected)


def test_a_grammar_that_cannot_be_followed_fails_its_own_row_alone() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    bad = guided(follows="nonsense")
    strange = guided("maybe", follows=YES_OR_NO)
    good = guided("y", follows=YES_OR_NO)
    rows = [Guided(place, one.guide, one.position, None) for place, one in enumerate((bad, good, strange))]
    masks = grammars.masks(rows, ())
    assert isinstance(masks[0], DrawFailed)
    assert isinstance(masks[2], DrawFailed)
    assert not isinstance(masks[1], DrawFailed)
    assert set(np.flatnonzero(masks[1])) == {ord("e")}
    assert "cannot be followed" in why(grammars, bad)


def test_what_is_dear_to_follow_fails_within_its_bounds() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    dear = grammar({"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"})
    assert "too many" in why(grammars, guided('"', follows=dear))


def test_a_model_whose_tokenizer_cannot_be_read_fails_only_who_needs_it() -> None:
    grammars = Grammars(replace(FILES, tokenizer_json=b'{"version": "1.0"}'), VOCABULARY)
    assert "could not be made" in why(grammars, guided(follows=YES_OR_NO))


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed() -> None:
    grammars = Grammars(FILES, VOCABULARY + 70)
    mask = grammars.masks([guided(follows=grammar({"type": "string"}))], ())[0]
    assert not isinstance(mask, DrawFailed)
    assert mask.shape == (VOCABULARY + 70,)
    assert not mask[VOCABULARY:].any()


def test_more_grammars_than_are_kept_are_made_again() -> None:
    grammars = Grammars(FILES, VOCABULARY)
    for number in (*range(140), 0):
        follows = LLMatcher.grammar_from_lark(f'start: "{number:03}"')
        grammars.expect(follows)
        assert allowed(grammars, guided(f"{number:03}"[:2], follows=follows)) == {ord(str(number % 10))}


# -- the draw ----------------------------------------------------------------------------------------------------


def test_sixty_four_that_were_announced_at_once_are_each_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, made, make = Grammars(FILES, VOCABULARY), [], Grammars._make

    def counted(self: Grammars, text: str) -> LLMatcher:
        made.append(text)
        return make(self, text)

    monkeypatch.setattr(Grammars, "_make", counted)
    texts = [LLMatcher.grammar_from_lark(f'start: "{number}"') for number in range(64)]
    for text in texts:
        grammars.expect(text)
    rows = [placed(guided(follows=text), place) for place, text in enumerate(texts)]
    assert len(grammars.masks(rows, ())) == 64
    assert made == texts


def test_a_step_waits_once_for_all_grammars_that_are_not_made_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hangs(_self: Grammars, _text: str) -> LLMatcher:
        never.wait(30)
        raise AssertionError

    monkeypatch.setattr(Grammars, "_make", hangs)
    monkeypatch.setattr("services.worker.grammars.MAKING_S", 0.2)
    grammars = Grammars(FILES, VOCABULARY)
    rows = [placed(guided(follows=f"g{place}"), place) for place in range(20)]
    begun_s = monotonic()
    masks = grammars.masks(rows, ())
    assert 0.2 <= monotonic() - begun_s < 20 * 0.2
    assert {mask.why for mask in masks.values() if isinstance(mask, DrawFailed)} == {
        "its grammar could not be made in time"
    }
    assert len(masks) == 20
    never.set()


def placed(one: Guided, place: int) -> Guided:
    return Guided(place, one.guide, one.position, one.awaits)


def mask_of(*ids: int, vocabulary: int = 300) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(vocabulary, np.bool_)
    mask[list(ids)] = True
    return mask


WARM: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"top_k": 200}, {"min_p": 0.1}, {"temperature": 1.9},
    {"presence_penalty": 2.0, "repetition_penalty": 1.5},
)  # fmt: skip


def test_nothing_else_is_ever_drawn_and_what_is_left_is_drawn_by_its_weight() -> None:
    torch.manual_seed(7)
    rows = torch.randn(400, 300) * 3
    rows[:, :5] += 20  # what the model wants most is not allowed
    draws = [
        Draw(Sampling(seed=n, **WARM[n % len(WARM)]), n, History((9, 9, 8), prompt_ids=(7,), ending_ids=()))
        for n in range(len(rows))
    ]
    masks = {n: mask_of(*random.Random(n).sample(range(5, 300), 1 + n % 40)) for n in range(len(rows))}
    before = rows.clone()
    tokens = draw_tokens(rows, draws, masks)
    assert torch.equal(rows, before)
    for n, token in enumerate(tokens):
        assert isinstance(token, int)
        assert masks[n][token], n
        if n % len(WARM) == 0:
            assert token == int(np.where(masks[n], rows[n].numpy(), -np.inf).argmax())
    even = draw_tokens(
        torch.zeros(2000, 300),
        [Draw(Sampling(seed=1), n) for n in range(2000)],
        dict.fromkeys(range(2000), mask_of(3, 250)),
    )
    assert 900 < even.count(3) < 1100


def test_free_rows_draw_what_they_draw_alone_and_failed_ones_say_why() -> None:
    torch.manual_seed(8)
    rows = torch.randn(12, 300)
    draws = [Draw(Sampling(seed=n, frequency_penalty=n % 2, logprobs=n % 3 or None), n) for n in range(12)]
    failed = DrawFailed("why")
    together = draw_tokens(rows, draws, {1: failed, 2: mask_of(5), 7: mask_of(6, 7)})
    alone = draw_tokens(rows, draws)
    assert together[1] is failed
    assert [one for n, one in enumerate(together) if n not in {1, 2, 7}] == [
        one for n, one in enumerate(alone) if n not in {1, 2, 7}
    ]


def test_logprobs_are_the_models_own() -> None:
    rows = torch.zeros(1, 300)
    rows[0, 4] = 5.0
    (one,) = draw_tokens(rows, [Draw(Sampling(temperature=0.0, logprobs=1), 0)], {0: mask_of(9)})
    assert isinstance(one, Drawn)
    assert one.token_id == 9
    assert one.logprobs.top[0].token_id == 4
    assert one.logprobs.logprob == pytest.approx(float(torch.log_softmax(rows[0], -1)[9]), abs=1e-5)


def test_a_least_length_holds_until_nothing_but_an_end_is_left() -> None:
    rows = torch.zeros(2, 300)
    rows[:, 250] = 9.0
    draws = [Draw(Sampling(temperature=0.0, min_tokens=5), 0, History((), prompt_ids=(), ending_ids={250, 999}))] * 2
    assert draw_tokens(rows, draws, {0: mask_of(3, 250), 1: mask_of(250)}) == (3, 250)
    assert without(mask_of(3), np.array([4, 1000])).tolist() == mask_of(3).tolist()


# -- whole answers -----------------------------------------------------------------------------------------------


def answer_to(request: SubmitRequest, *, prompt_in_pieces: bool = False) -> tuple[list[int], str | None]:
    """Return the whole answer of one worker that runs a request alone, and why it ended."""
    executor = FakeExecutor(64)
    ledger = Ledger(WORKER, executor.size, Model(frozenset({EOS_ID}), VOCABULARY), b"key")
    ledger.claim("nonce")
    output = list(request.output_ids)
    computed, plans = 0, 0
    while True:
        known = len(request.prompt_ids) + len(output)
        count = 1 if prompt_in_pieces else known - computed
        plans += 1
        slices = (piece(request.request, computed, count),)
        accepted = ledger.accept(StepPlan(1, plans, (new(request, *range(60)),) if plans == 1 else (), slices))
        assert isinstance(accepted, Accepted), accepted
        rows = ledger.settle(accepted, executor.execute(accepted.batch)).rows
        computed += count
        output += rows[0].token_ids
        if rows[0].finish is not None:
            return output, rows[0].finish


def text_of(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


def wanted(name: str, number: int, **fields: Any) -> SubmitRequest:
    sampling = Sampling(seed=number, grammar=grammar(SCHEMAS[name]))
    return submit(
        f"{name}-{number}", tuple(f"prompt {number}".encode()), **{"max_tokens": 400, "sampling": sampling, **fields}
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_their_schema_and_end_by_themselves_or_are_cut(name: str) -> None:
    ends = set()
    for number in range(6):
        ids, finish = answer_to(wanted(name, number))
        ends.add(finish)
        if finish == "stop":
            assert ids[-1] == EOS_ID
            assert fits(json.loads(text_of(ids)), SCHEMAS[name])
        else:
            assert (finish, len(ids)) == ("length", 400)
    assert "stop" in ends


def test_an_attempt_that_goes_on_from_any_token_comes_to_the_same_answer() -> None:
    request = wanted("nested", 3)
    whole, finish = answer_to(request)
    assert finish == "stop"
    for done in range(0, len(whole), 7):
        again = replace(request, attempt=1, output_ids=tuple(whole[:done]))
        assert answer_to(again) == (whole, finish)
        assert answer_to(again, prompt_in_pieces=True) == (whole, finish)


def test_an_attempt_whose_output_does_not_follow_its_grammar_fails() -> None:
    request = replace(wanted("person", 1), attempt=1, output_ids=tuple(b"[1"))
    assert answer_to(request) == (list(b"[1"), "error")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_neither_preemption_nor_company_nor_plans_ahead_nor_a_new_leader_change_an_answer(depth: int) -> None:
    requests = {f"{name}-{n}": wanted(name, n, max_tokens=90) for name in SCHEMAS for n in range(3)}
    free = {f"free-{n}": submit(f"free-{n}", tuple(f"free {n}".encode()), max_tokens=60) for n in range(6)}
    expected = {name: answer_to(request) for name, request in (requests | free).items()}
    conductor = Conductor(FakeExecutor(64), (EOS_ID,), Limits(64, 16), depth=depth, blocks=20)
    for name, request in (requests | free).items():
        conductor.submit(name, request.prompt_ids, request.max_tokens, sampling=request.sampling)
    for _ in range(30):
        conductor.iterate()
    conductor.claim()
    conductor.run_dry()
    assert conductor.preempted
    assert bool(conductor.foreseen) == (depth > 1)
    for name, (ids, finish) in expected.items():
        assert (conductor.text(name), conductor.answers[name].finish) == (tuple(ids), finish), name


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_follow_their_grammar_whoever_is_told_of_its_prompt_in_the_same_steps(depth: int) -> None:
    requests = {f"{name}-{n}": wanted(name, n, max_tokens=90) for name in SCHEMAS for n in range(2)}
    expected = {name: answer_to(request) for name, request in requests.items()}
    conductor = Conductor(FakeExecutor(64), (EOS_ID,), Limits(24, 16), depth=depth)
    for number, (name, request) in enumerate(requests.items()):
        most = 1 if number % 2 else None
        sampling = replace(request.sampling, prompt_logprobs=most)
        conductor.submit(name, request.prompt_ids, request.max_tokens, sampling=sampling)
        conductor.submit(f"told-{name}", request.prompt_ids * 7, 5, sampling=Sampling(prompt_logprobs=0))
    conductor.run_dry()
    for number, (name, (ids, finish)) in enumerate(expected.items()):
        assert (conductor.text(name), conductor.answers[name].finish) == (tuple(ids), finish), name
        prompt_tokens = len(requests[name].prompt_ids)
        assert len(conductor.answers[name].of_prompt) == (prompt_tokens - 1 if number % 2 else 0)
        assert len(conductor.answers[f"told-{name}"].of_prompt) == 7 * prompt_tokens - 1


def test_one_that_fails_leaves_the_others_as_they_are() -> None:
    conductor = Conductor(FakeExecutor(64), (EOS_ID,), Limits(64, 16), depth=2)
    good = wanted("person", 1)
    conductor.submit("good", good.prompt_ids, 400, sampling=good.sampling)
    conductor.submit("bad", PROMPT, 400, sampling=Sampling(grammar="nonsense"))
    conductor.submit("free", PROMPT, 30)
    conductor.run_dry()
    assert (conductor.text("bad"), conductor.answers["bad"].finish) == ((), "error")
    assert list(conductor.text("good")) == answer_to(good)[0]
    assert list(conductor.text("free")) == answer_to(submit("free", PROMPT, max_tokens=30))[0]
    assert RequestId("bad") not in conductor.planner.state.requests
