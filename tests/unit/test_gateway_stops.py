"""Stop strings: any split of any text gives the same result as looking for them in the whole text."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.stops import StopMatcher

FEW_LETTERS = st.text("ab", max_size=40)
STOP = st.text("ab", min_size=1, max_size=6)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(borders)]


def shown(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.end(), matcher.stopped


@given(FEW_LETTERS, st.lists(st.integers(0, 1000)), STOP)
@example("aab", [1], "ab")
@example("ababac", [3, 4], "abac")
def test_one_stop_string_is_found_where_find_finds_it_however_the_text_was_split(
    text: str, cuts: list[int], stop: str
) -> None:
    place = text.find(stop)
    assert shown(pieces_of(text, cuts), [stop]) == (text if place < 0 else text[:place], place >= 0)


@given(FEW_LETTERS, st.lists(st.integers(0, 1000)), st.lists(STOP, min_size=1, max_size=4))
def test_of_several_stop_strings_the_first_to_be_complete_counts_and_the_longest_of_those(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert shown(pieces_of(text, cuts), stops) == expected


@given(st.text(max_size=30), st.lists(st.integers(0, 1000)), st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_no_part_of_a_stop_string_is_shown_that_has_to_be_taken_back(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    final, _ = shown(pieces_of(text, cuts), stops)
    so_far = ""
    for piece in pieces_of(text, cuts):
        so_far += matcher.push(piece)
        assert final.startswith(so_far)


@given(FEW_LETTERS, STOP)
def test_only_what_could_still_become_a_stop_string_is_held_back(text: str, stop: str) -> None:
    if stop in text:
        return
    matcher = StopMatcher([stop])
    held = text.removeprefix(matcher.push(text))
    longest = max(length for length in range(len(stop)) if text.endswith(stop[:length]))
    assert len(held) == longest


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("all of it") == "all of it"
    assert matcher.end() == ""


def test_a_stop_string_that_is_complete_too_early_is_text_and_one_that_only_begins_there_stops() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("xaab", may_stop=False) == "xaab"
    assert matcher.push("aab") == ""
    assert matcher.stopped
    matcher = StopMatcher(["aab"])
    assert matcher.push("xaa", may_stop=False) == "x"
    assert matcher.push("b") == ""
    assert matcher.stopped


def test_what_a_stop_string_that_came_too_early_ends_with_may_begin_the_next() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.push("aba", may_stop=False) == "ab"
    assert matcher.push("ba") == ""
    assert matcher.stopped
