"""What waits is counted in tokens, in all and of each client, until its first token or its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.queued import Queued, Waiting
from services.gateway.tenants import Tenant
from shared.errors import KeyLimited, Overloaded
from shared.ids import RequestId

ANYBODY = Tenant("a")


def queued(*waiting: tuple[str, int]) -> Queued:
    line = Queued()
    for number, (tenant, tokens) in enumerate(waiting):
        line.join(RequestId(str(number)), Waiting(tenant, tokens, float(number)))
    return line


def test_there_is_room_up_to_the_last_token_and_not_for_one_more() -> None:
    line = queued(("a", 4), ("b", 5))
    line.check_room(ANYBODY, 1, 10)
    with pytest.raises(Overloaded) as refused:
        line.check_room(ANYBODY, 2, 10)
    assert refused.value.code == "queue_full"


def test_a_prompt_longer_than_the_whole_line_is_let_in_when_nobody_waits() -> None:
    queued().check_room(ANYBODY, 1000, 10)
    queued(("b", 1)).check_room(Tenant("a", max_queued_tokens=10), 1000, 10_000)


def test_a_client_has_no_room_while_others_have() -> None:
    line = queued(("a", 8), ("b", 8))
    with pytest.raises(KeyLimited) as refused:
        line.check_room(Tenant("a", max_queued_tokens=10), 3, 100)
    assert refused.value.code == "rate_limit_exceeded"
    line.check_room(Tenant("b", max_queued_tokens=11), 3, 100)


def test_who_has_waited_for_too_long_is_named_in_the_order_of_coming() -> None:
    line = queued(("a", 1), ("a", 1), ("a", 1))
    line.leave(RequestId("1"))
    assert line.since_before(2.0) == ["0"]
    assert line.since_before(2.1) == ["0", "2"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=20), st.data())
def test_whoever_leaves_and_how_often_nothing_is_counted_of_who_is_gone(
    waiting: list[tuple[str, int]], data: st.DataObject
) -> None:
    line = queued(*waiting)
    gone = data.draw(st.lists(st.integers(0, 25)))
    for number in gone:
        line.leave(RequestId(str(number)))
    left = [one for number, one in enumerate(waiting) if number not in gone]
    assert (len(line), line.tokens) == (len(left), sum(tokens for _, tokens in left))
    assert line._tokens_of == {
        tenant: sum(tokens for other, tokens in left if other == tenant) for tenant, _ in left
    }, "who waits for nothing is not remembered"
