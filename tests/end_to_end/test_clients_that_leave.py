"""32 streams at once, every third cut by its client: afterwards nothing runs, nothing waits, all blocks are free."""

import asyncio
from pathlib import Path

import pytest

from shared.runtime.clock import monotonic
from tests.end_to_end.served import FAKE, MODEL, client_of, eventually, figures, nothing_is_left
from tests.integration.processes import Up, slipstream_up

STREAMS, TOKENS = 32, 120


async def stream(up: Up, number: int, *, cut: bool) -> int:
    """Read a stream to its end, or leave it after the third piece; return the tokens that usage counts, 0 if cut."""
    client = client_of(up)
    async with client:
        pieces = await client.completions.create(
            model=MODEL,
            prompt=f"number {number}",
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        counted = read = 0
        async for piece in pieces:
            read += 1
            if cut and read == 3:
                await pieces.close()
                return 0
            counted = piece.usage.completion_tokens if piece.usage else counted
    return counted


async def first_token_s(up: Up) -> float:
    began_s = monotonic()
    async with client_of(up) as client:
        await client.completions.create(model=MODEL, prompt="hi", max_tokens=1, extra_body={"ignore_eos": True})
    return monotonic() - began_s


@pytest.mark.timeout(120)
async def test_every_third_of_32_streams_is_cut_and_nothing_is_left_of_them(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "10", "--max-num-seqs", "16") as up:
        up.until_ready()
        before_s = await first_token_s(up)
        counted = await asyncio.gather(*(stream(up, n, cut=n % 3 == 0) for n in range(STREAMS)))
        assert [n for n in counted if n] == [TOKENS] * (STREAMS - 11)
        found = await eventually(nothing_is_left, up)
        assert found['slipstream_requests_finished_total{reason="abort"}'] == 11
        assert await first_token_s(up) < before_s + 1


@pytest.mark.timeout(120)
async def test_a_client_that_hangs_up_while_it_waits_for_a_whole_answer_stops_its_computation(
    short_folder: Path,
) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "20") as up:
        up.until_ready()
        async with client_of(up) as client:
            whole = client.completions.create(
                model=MODEL, prompt="hi", max_tokens=4000, extra_body={"ignore_eos": True}
            )
            request = asyncio.ensure_future(whole)
            await eventually(lambda found: found["slipstream_requests_running"] == 1, up)
            request.cancel()
        found = await eventually(nothing_is_left, up)
        assert found['slipstream_requests_finished_total{reason="abort"}'] == 1
        generated = found["slipstream_generation_tokens_total"]
        assert generated < 4000
        await first_token_s(up)
        assert (await figures(up))["slipstream_generation_tokens_total"] == generated + 1
