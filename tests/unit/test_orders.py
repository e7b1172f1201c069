"""Queue orders, by hand-computed numbers."""

from collections.abc import Sequence

import pytest

from shared.ids import RequestId
from shared.scheduling.orders import ORDERS
from shared.scheduling.orders.fair import OLDEST_EVERY, TENANTS_REMEMBERED, Fair
from shared.scheduling.orders.fixed import AGING_MS, Fixed, by_arrival, by_urgency
from shared.scheduling.request import Request
from tests.harness import Bench


def request(name: str, at_ms: int = 0, *, priority: int = 0, tenant: str = "", sequence: int = 0) -> Request:
    return Request(RequestId(name), 1, (at_ms, sequence), 4, 4, priority=priority, tenant=tenant)


def names(requests: Sequence[Request]) -> list[str]:
    return [str(each.id) for each in requests]


def line_of(order: Fair | Fixed) -> list[str]:
    return names(list(order))


@pytest.mark.parametrize("name", ORDERS)
def test_who_is_added_is_yielded_once_and_who_is_removed_is_gone(name: str) -> None:
    order = ORDERS[name]()
    requests = [request(f"r{number}", number, tenant="ab"[number % 2]) for number in range(5)]
    for each in requests:
        order.add(each)
    assert (len(order), sorted(names(list(order)))) == (5, ["r0", "r1", "r2", "r3", "r4"])
    order.remove(requests[2])
    assert (len(order), sorted(names(list(order)))) == (4, ["r0", "r1", "r3", "r4"])
    with pytest.raises(ValueError, match=r"."):
        order.remove(requests[2])


@pytest.mark.parametrize("name", ORDERS)
def test_who_does_not_wait_cannot_be_removed(name: str) -> None:
    order = ORDERS[name]()
    order.add(request("waits", tenant="a"))
    for tenant in ("a", "b"):
        with pytest.raises(ValueError):  # noqa: PT011 - of `Fair` it is the list's own, with the list's own words
            order.remove(request("does not", tenant=tenant))
    assert len(order) == 1


@pytest.mark.parametrize("name", ORDERS)
def test_who_has_been_yielded_may_be_removed_meanwhile(name: str) -> None:
    order = ORDERS[name]()
    for number in range(4):
        order.add(request(f"r{number}", number, tenant="ab"[number % 2]))
    seen = []
    for each in order:
        order.remove(each)
        seen.append(str(each.id))
    assert (len(order), len(order) or sorted(seen)) == (0, ["r0", "r1", "r2", "r3"])


def test_same_arrival_is_told_apart_by_sequence_and_then_by_id() -> None:
    order = Fixed(by_arrival)
    for each in (request("b"), request("a"), request("first", sequence=-1)):
        order.add(each)
    assert line_of(order) == ["first", "a", "b"]


# -- priority -------------------------------------------------------------------------------------------------------


def test_a_step_of_priority_is_worth_half_a_minute_and_not_a_millisecond_more() -> None:
    assert AGING_MS == 30_000
    patient = request("patient", 0, priority=1)
    in_time, too_late = request("in time", 29_999, priority=0), request("too late", 30_001, priority=0)
    order = Fixed(by_urgency)
    for each in (too_late, patient, in_time):
        order.add(each)
    assert line_of(order) == ["in time", "patient", "too late"]


def test_at_the_very_moment_the_earlier_one_comes_first() -> None:
    order = Fixed(by_urgency)
    for each in (request("urgent", 60_000, priority=-1), request("patient", 0, priority=1)):
        order.add(each)
    assert line_of(order) == ["patient", "urgent"]


def test_three_steps_of_priority_are_a_minute_and_a_half() -> None:
    assert by_urgency(request("p3", 10, priority=3))[0] == 90_010.0
    assert by_urgency(request("p0", 90_009))[0] < by_urgency(request("p3", 10, priority=3))[0]


def test_by_arrival_nobody_takes_a_place_and_by_urgency_one_may() -> None:
    assert [ORDERS[name]().takes_places for name in ("fcfs", "priority", "fair")] == [False, True, False]


# -- fair: counters -------------------------------------------------------------------------------------------------


def served(order: Fair, tenant: str) -> float:
    return order._served.get(tenant, 0.0)


def test_a_prompt_token_costs_one_and_an_answer_token_two() -> None:
    order = Fair()
    each = request("r", tenant="t")
    order.charge_prompt(each, 100, overtakes=False)
    for _ in range(7):
        order.charge_output([each])
    assert served(order, "t") == 100 * 1 + 7 * 2


def test_the_tenant_that_had_least_is_served_and_within_it_who_came_first() -> None:
    order = Fair()
    for number in range(3):
        order.add(request(f"a{number}", number, tenant="a"))
        order.add(request(f"b{number}", 10 + number, tenant="b"))
    order.charge_prompt(request("ran", tenant="a"), 10, overtakes=False)
    assert line_of(order) == ["b0", "b1", "b2", "a0", "a1", "a2"]


def test_what_is_charged_while_the_line_is_walked_counts_for_whose_turn_is_next() -> None:
    order = Fair()
    for number in range(3):
        order.add(request(f"a{number}", number, tenant="a"))
        order.add(request(f"b{number}", 10 + number, tenant="b"))
    walked = []
    for each in order:  # a0 costs 10, b0 and b1 cost 4 each, then b has had 8: b2 before a1
        order.remove(each)
        order.charge_prompt(each, 10 if each.tenant == "a" else 4, overtakes=False)
        walked.append(str(each.id))
    assert walked == ["a0", "b0", "b1", "b2", "a1", "a2"]


def test_who_returns_is_lifted_to_the_least_served_of_those_who_wait() -> None:
    order = Fair()
    for tenant, tokens in (("a", 70), ("b", 50), ("c", 0)):
        order.charge_prompt(request(f"{tenant}0", tenant=tenant), tokens, overtakes=False)
    order.add(request("b1", 1, tenant="b"))
    order.add(request("a1", 2, tenant="a"))
    order.add(request("c1", 3, tenant="c"))
    assert served(order, "c") == 50  # not 0: it saved nothing up; and not 70
    assert line_of(order) == ["b1", "c1", "a1"]


def test_who_returns_having_had_more_keeps_it() -> None:
    order = Fair()
    order.charge_prompt(request("a0", tenant="a"), 70, overtakes=False)
    order.add(request("b1", tenant="b"))
    order.add(request("a1", tenant="a"))
    assert (served(order, "a"), served(order, "b")) == (70, 0)


def test_when_nobody_waits_a_newcomer_is_lifted_to_whose_line_ran_empty_last() -> None:
    order = Fair()
    only = request("a0", tenant="a")
    order.add(only)
    order.remove(only)
    order.charge_prompt(only, 40, overtakes=False)
    order.add(request("b0", tenant="b"))
    assert served(order, "b") == 40


def test_nobody_returns_below_what_the_least_served_has_once_had() -> None:
    order = Fair()
    first = request("a0", tenant="a")
    order.charge_prompt(first, 100, overtakes=False)
    order.add(first)
    order.add(request("b0", tenant="b"))  # lifted to 100: the floor
    for tenant in ("c", "d"):
        order.add(request(f"{tenant}0", tenant=tenant))
    assert [served(order, tenant) for tenant in "abcd"] == [100] * 4


def test_those_who_run_stand_in_order_of_what_their_tenants_have_had() -> None:
    order = Fair()
    order.charge_prompt(request("x", tenant="a"), 9, overtakes=False)
    running = [request("a0", 0, tenant="a"), request("b0", 1, tenant="b"), request("b1", 2, tenant="b")]
    order.sort(running)
    assert names(running) == ["b0", "b1", "a0"]  # the last gives way first
    order.charge_output([running[0]] * 20)
    assert names(sorted(running, key=order.place)) == ["b0", "b1", "a0"], "it does not change while a step is planned"
    order.sort(running)
    assert names(running) == ["a0", "b0", "b1"]


def test_who_runs_and_has_never_been_charged_stands_before_who_had_a_single_token() -> None:
    """As after a change of leaders: who was taken over has been charged nothing here."""
    order = Fair()
    order.charge_prompt(request("x", tenant="charged"), 1, overtakes=False)
    running = [request("first", 0, tenant="charged"), request("taken over", 1, tenant="unknown")]
    order.sort(running)
    assert names(running) == ["taken over", "first"]


def test_a_newcomer_whose_tenant_did_not_run_stands_where_its_tenant_is_by_now() -> None:
    order = Fair()
    order.charge_prompt(request("x", tenant="a"), 9, overtakes=False)
    runs, newcomer = request("a0", 0, tenant="a"), request("b0", 1, tenant="b")
    order.sort([runs])
    assert order.place(newcomer) < order.place(runs)
    order.charge_prompt(newcomer, 10, overtakes=False)
    assert order.place(newcomer) > order.place(runs)


# -- fair: nobody starves -------------------------------------------------------------------------------------------


def admit(order: Fair, count: int) -> list[str]:
    """Admit as one plan does: walk the line, remove, charge."""
    admitted: list[str] = []
    for each in order:
        if len(admitted) == count:
            break
        order.remove(each)
        order.charge_prompt(each, 1, overtakes=False)
        admitted.append(str(each.id))
    return admitted


def starving(newcomers: int) -> Fair:
    """An old request of a tenant that had much, behind new tenants that had nothing."""
    order = Fair()
    order.charge_output([request("x", tenant="much")] * 1000)
    for number in range(newcomers):
        order.add(request(f"n{number}", 10 + number, tenant=f"t{number}"))
    order.add(request("old", 0, tenant="much"))
    return order


@pytest.mark.parametrize("at_once", [1, 3, 5, 8, 20])
def test_each_eighth_admission_goes_to_the_oldest_however_many_one_plan_admits(at_once: int) -> None:
    order = starving(20)
    admitted: list[str] = []
    while len(order):
        admitted += admit(order, at_once)
    assert admitted.index("old") == 7
    assert admitted[:7] == [f"n{number}" for number in range(7)]


def test_an_oldest_that_cannot_run_here_leaves_its_turn_to_the_next_oldest() -> None:
    order = starving(20)
    order.add(request("second", 1, tenant="much"))
    admit(order, 7)
    walked = [str(each.id) for each in order]
    assert walked[:3] == ["old", "second", "n7"]
    assert len(walked) == len(set(walked)) == len(order)


def test_the_oldest_is_charged_like_any_other() -> None:
    order = starving(20)
    admit(order, 8)
    assert served(order, "much") == 2001


def test_no_seat_stays_empty_while_one_tenant_alone_has_requests() -> None:
    bench = Bench("sarathi", seqs=4, order="fair")
    for number in range(8):
        bench.arrive(f"a{number}", 4, 3, tenant="a")
    assert [len(rows) for rows in bench.iterate_times(6)] == [4, 4, 4, 4, 4, 4]


def test_two_tenants_who_always_wait_get_the_same_service_however_many_requests_one_has() -> None:
    bench = Bench("sarathi", seqs=2, order="fair", blocks=1000)
    for number in range(60):
        bench.arrive(f"a{number}", 8, 4, tenant="a")
    for number in range(20):
        bench.arrive(f"b{number}", 8, 4, tenant="b")
    done: dict[str, int] = {"a": 0, "b": 0}
    while done["b"] < 20:
        bench.iterate()
        done = {tenant: sum(name.startswith(tenant) for name in bench.done_at) for tenant in "ab"}
    assert abs(done["a"] - done["b"]) <= 4  # of 60 and 20 that came first and later


# -- fair: memory ---------------------------------------------------------------------------------------------------


def test_the_number_of_tenants_remembered_is_bounded_and_who_lost_most_by_it_is_kept() -> None:
    order = Fair()
    order.charge_output([request("x", tenant="greedy")] * 50_000)
    for number in range(TENANTS_REMEMBERED + 10):
        each = request(f"r{number}", number, tenant=f"t{number}")
        order.add(each)
        order.remove(each)
        order.charge_prompt(each, 1, overtakes=False)
    assert len(order._served) <= TENANTS_REMEMBERED
    assert served(order, "greedy") == 100_000


def test_nobody_is_forgotten_up_to_the_bound_and_half_of_them_beyond_it() -> None:
    order = Fair()
    for number in range(TENANTS_REMEMBERED):
        each = request(f"r{number}", number, tenant=f"t{number}")
        order.add(each)
        order.remove(each)
    assert len(order._served) == TENANTS_REMEMBERED
    order.add(request("one more", TENANTS_REMEMBERED, tenant="one more"))
    assert len(order._served) == TENANTS_REMEMBERED // 2


def test_who_waits_is_never_forgotten() -> None:
    order = Fair()
    order.add(request("waits", 0, tenant="waits"))
    order.charge_output([request("x", tenant="waits")] * 5)
    for number in range(TENANTS_REMEMBERED + 10):
        each = request(f"r{number}", 1 + number, tenant=f"t{number}")
        order.add(each)
        order.remove(each)
    assert served(order, "waits") == 10


def test_who_is_forgotten_below_the_floor_returns_as_if_it_had_been_remembered() -> None:
    remembered, forgotten = Fair(), Fair()
    for order in (remembered, forgotten):
        order.charge_prompt(request("x", tenant="idle"), 3, overtakes=False)
        order.charge_prompt(request("y", tenant="busy"), 50, overtakes=False)
        order.add(request("busy", 0, tenant="busy"))
        order.add(request("other", 1, tenant="other"))  # lifted to 50
    del forgotten._served["idle"]
    for order in (remembered, forgotten):
        order.add(request("idle", 2, tenant="idle"))
    assert served(remembered, "idle") == served(forgotten, "idle") == 50


def test_when_everybody_was_forgotten_a_newcomer_still_begins_at_the_floor() -> None:
    order = Fair()
    order.charge_prompt(request("x", tenant="busy"), 50, overtakes=False)
    waiting = [request("busy", 0, tenant="busy"), request("other", 1, tenant="other")]
    for each in waiting:
        order.add(each)
    for each in waiting:
        order.remove(each)
    order._served.clear()
    order.add(request("new", 2, tenant="new"))
    assert served(order, "new") == 50


def test_an_oldest_that_was_passed_over_keeps_its_turn() -> None:
    order = Fair()
    for number in range(20):
        order.add(request(f"r{number:02}", number, tenant=f"t{number}"))
    order.charge_output([request("y", tenant="t0")])
    for _ in range(OLDEST_EVERY - 1):
        assert next(iter(order)).id == "r01", "r00's tenant has had more, and it is not its turn yet"
        order.charge_prompt(request("x", 100, tenant="x"), 1, overtakes=True)
    for _ in range(3):
        assert next(iter(order)).id == "r00"
        order.charge_prompt(request("short", 200, tenant="x"), 1, overtakes=True)
    assert next(iter(order)).id == "r00"
