import asyncio
import json
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import ClientSession
from rich.console import Console

from loadgen.answer import Answer, Chunk, Failure, Usage
from loadgen.client import Client, Record
from loadgen.drive import Load
from loadgen.progress import display, keep_showing
from loadgen.prompts import Request
from loadgen.report import print_tables, row, write_json
from loadgen.settings import RunSettings
from loadgen.summary import Run, summarise
from shared.runtime.clock import monotonic


def good() -> Record:
    """Sent at 100.5, meant for 100; its tokens came at 101, 102 and 104."""
    answer = Answer()
    answer.chunks = [Chunk(moment_s, count, has_text=True) for count, moment_s in ((1, 101.0), (2, 102.0), (3, 104.0))]
    answer.first_event_s = answer.first_text_s = 101.0
    answer.done_s = 104.5
    answer.usage, answer.finish_reason = Usage(prompt_tokens=2, completion_tokens=3), "length"
    request = Request(1, (33, 34), 3, leaves_early=False)
    return Record(request, 100.0, 100.5, headers_s=100.75, ended_s=104.6, answer=answer)


def refused() -> Record:
    failure = Failure("http", "the line is full", 429, "2")
    return Record(Request(0, "a b", 3, leaves_early=False), 100.0, 100.0, ended_s=100.1, failure=failure)


def tables(*records: Record, interrupted: int = 0) -> str:
    console = Console(file=StringIO(), width=100)
    print_tables(summarise(Run(records, 100.0, is_open_loop=True, interrupted=interrupted)), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip("│ ").startswith(name)]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_table_shows_latencies_in_milliseconds_and_failures_by_kind() -> None:
    shown = tables(good(), refused(), interrupted=4)
    assert cells(shown, "requests  ") == ["1 ok, 1 failed, 4 interrupted"]
    assert cells(shown, "output tokens / s") == [f"{3 / 4.5:.1f}"]
    assert cells(shown, "TTFT  ") == ["500.0"] * 5
    assert cells(shown, "TTFT from intended") == ["1000.0"] * 5
    assert cells(shown, "TBT") == ["1500.0", "1900.0", "1990.0", "1500.0", "2000.0"]
    assert cells(shown, "TPOT") == ["1750.0"] * 5
    assert cells(shown, "longest gap") == ["2000.0"] * 5
    assert cells(shown, "E2E  ") == ["4000.0"] * 5
    assert cells(shown, "http_429") == ["1"]
    assert "note: INVALID" in shown


def test_without_a_success_there_are_no_latencies_to_show() -> None:
    shown = tables(refused())
    assert "0 ok, 1 failed" in shown
    assert "TTFT" not in shown


def test_a_row_has_moments_from_the_start_of_the_run_and_durations() -> None:
    shown = row(good(), 100.0)
    moments = [shown[key] for key in ("intended_s", "sent_s", "headers_s", "first_event_s", "first_text_s", "done_s")]
    assert moments == [0.0, 0.5, 0.75, 1.0, 1.0, 4.5]
    assert (shown["ttft_s"], shown["ttft_from_intended_s"], shown["e2e_s"], shown["tpot_s"]) == (0.5, 1.0, 4.0, 1.75)
    assert shown["chunks"] == [(1.0, 1, True), (2.0, 2, True), (4.0, 3, True)]


def test_the_row_of_a_failure_says_why_and_claims_no_latency() -> None:
    shown = row(refused(), 100.0)
    assert (shown["outcome"], shown["failure"]["name"], shown["failure"]["retry_after"]) == ("failed", "http_429", "2")
    assert (shown["ttft_s"], shown["e2e_s"], shown["first_text_s"]) == (None, None, None)


def test_a_result_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    write_json(path, {"requests": [row(good(), 100.0)]})
    assert json.loads(path.read_text())["requests"][0]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


async def load_with(*records: Record) -> Load:
    target = RunSettings().target("m")
    async with ClientSession() as session:
        load = Load(Client(session, target, monotonic), target, monotonic)
    load.records, load.sent, load.failed, load.output_tokens = [*records], len(records) + 2, 1, 3
    return load


async def test_a_log_gets_lines_and_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = await load_with(good(), refused())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with display(requests=4, duration_s=100.0) as lines:
        lines.show(load, elapsed_s=7.0)
    plain = capsys.readouterr()
    assert plain.err == "     7 s  2 done, 2 running, 1 failed, 3 tokens generated\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with display(requests=4, duration_s=100.0) as bar:
        bar.show(load, elapsed_s=7.0)
    coloured = capsys.readouterr()
    assert " 50 %" in coloured.err
    assert "2 done, 2 running" in coloured.err
    assert plain.out == coloured.out == ""


async def test_progress_is_shown_again_and_again_until_the_run_is_over() -> None:
    class Counting:
        every_s = 0.001

        def __init__(self) -> None:
            self.shown = 0
            self.thrice = asyncio.Event()

        def show(self, load: Load, elapsed_s: float) -> None:
            assert load.sent == 3
            assert elapsed_s > 0
            self.shown += 1
            if self.shown == 3:
                self.thrice.set()

    counting = Counting()
    load = await load_with(good())
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        showing = group.create_task(keep_showing(counting, load, monotonic))
        await counting.thrice.wait()
        showing.cancel()
    assert counting.shown >= 3
