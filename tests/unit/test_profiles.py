"""What py-spy writes, read: stacks, counts, and whose time it is."""

import sys
import threading
import traceback

import pytest

from shared.runtime.threads import Threads
from tests.benchmarks.profiles import LOOP, OTHER, Sample, read_raw, shares, table

LOOP_FRAMES = "<module> (services/cli.py:1);run (asyncio/runners.py:86);_run_once (asyncio/base_events.py:1845)"
RAW = f"""\
{LOOP_FRAMES} 10
{LOOP_FRAMES};_write (services/gateway/generate.py:113);send (services/gateway/sse.py:17) 5
{LOOP_FRAMES};send (services/gateway/sse.py:17);write (aiohttp/http_writer.py:1);write (asyncio/selector_events.py:2) 40
{LOOP_FRAMES};run (services/gateway/reader.py:37);decode (shared/protocol/codec.py:31) 20
{LOOP_FRAMES};read_response (redis/_parsers/resp2.py:40) 15
{LOOP_FRAMES};hear (services/gateway/ongoing.py:40) 10
"""


def test_a_line_is_a_stack_without_line_numbers_and_its_count() -> None:
    assert read_raw("<module> (a.py:1);f<locals>.<lambda> (b c/d.py:22);native_call (lib.so) 3\n\n") == [
        Sample(("<module> (a.py)", "f<locals>.<lambda> (b c/d.py)", "native_call (lib.so)"), 3)
    ]
    assert read_raw("") == []


@pytest.mark.parametrize("line", ["3", "f (a.py:1)", "f (a.py:1) x", "f (a.py:1) -3"])
def test_what_is_no_stack_with_a_count_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a stack and its count"):
        read_raw(line)


def test_the_innermost_frame_of_a_kind_decides_and_the_loop_has_only_what_is_its_own() -> None:
    groups = shares((one.group, one.count) for one in read_raw(RAW))
    assert dict(groups) == {
        "socket send": 0.4, "msgpack": 0.2, "redis protocol": 0.15, LOOP: 0.1, OTHER: 0.1, "JSON and SSE": 0.05,
    }  # fmt: skip
    assert groups[0] == ("socket send", 0.4), "the largest is first"


def test_self_time_is_that_of_the_innermost_function_whoever_calls_it() -> None:
    raw = "f (a.py:1);g (a.py:9) 1\ng (a.py:9) 2\nf (a.py:1) 1\n"
    assert shares((one.function, one.count) for one in read_raw(raw)) == [("g (a.py)", 0.75), ("f (a.py)", 0.25)]


def test_the_table_tells_kinds_then_the_functions_that_take_most() -> None:
    many = read_raw("\n".join(f"f{number} (a.py:{number}) {number}" for number in range(1, 21)))
    lines = table("gateway", many).splitlines()
    assert lines[0] == "gateway: 210 samples, and 0 of threads that wait"
    assert lines[3] == "| other | 100.0% |"
    assert lines[4] == "| f20 (a.py) | 9.5% |"
    assert len(lines) == 4 + 12


@pytest.mark.parametrize(
    "leaf",
    [
        "EpollSelector.select (selectors.py:468)",
        "_worker (concurrent/futures/thread.py:81)",
        "_serve (shared/runtime/threads.py:70)",
    ],
)
def test_who_waits_has_no_share(leaf: str) -> None:
    lines = table("scheduler", read_raw(f"f (a.py:1) 5\nf (a.py:1);{leaf} 95\n")).splitlines()
    assert lines == [
        "scheduler: 5 samples, and 95 of threads that wait",
        "| | of its time |",
        "|---|---|",
        "| other | 100.0% |",
        "| f (a.py) | 100.0% |",
    ]


def test_the_threads_of_ours_wait_in_the_function_that_is_known_for_it() -> None:
    threads = Threads(1, "waits")
    ident = threads.submit(threading.get_ident).result(10)
    stack = traceback.extract_stack(sys._current_frames()[ident])
    outermost = next(frame for frame in stack if frame.filename.endswith("shared/runtime/threads.py"))
    assert Sample((f"{outermost.name} (shared/runtime/threads.py)",), 1).is_waiting
