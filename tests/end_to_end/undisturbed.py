"""What streams of the fake executor come to when nothing goes wrong, and how they are read while something does."""

import asyncio
from collections.abc import Callable

from services.worker.fake_executor import fake_next_token
from tests.end_to_end.served import MODEL, client_of
from tests.integration.processes import Up

_ALL_S = 60.0


def expected_text(prompt: str, tokens: int) -> str:
    """Return what the fake executor says after a prompt when nothing goes wrong: its control tokens are no text."""
    ids = list(prompt.encode())
    for _ in range(tokens):
        ids.append(fake_next_token(ids))
    return bytes(token for token in ids[len(prompt.encode()) :] if token < 256).decode()


def expected_texts(streams: int, tokens: int) -> list[str]:
    """Return what `texts_across` comes to."""
    return [expected_text(f"prompt {n}", tokens) for n in range(streams)]


async def stream(up: Up, prompt: str, tokens: int, streaming: asyncio.Event, *, priority: int = 0) -> str:
    """Read a stream to its end; ``streaming`` is set with its first piece."""
    async with client_of(up) as client:
        extra = {"ignore_eos": True, "priority": priority}
        pieces = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, stream=True, extra_body=extra
        )
        text = []
        async for piece in pieces:
            text.append(piece.choices[0].text)
            streaming.set()
    return "".join(text)


async def texts_across(up: Up, blow: Callable[[], None], streams: int, tokens: int) -> list[str]:
    """Stream, strike once all streams run, and return what they came to."""
    running = [asyncio.Event() for _ in range(streams)]
    reading = [asyncio.ensure_future(stream(up, f"prompt {n}", tokens, running[n])) for n in range(streams)]
    async with asyncio.timeout(_ALL_S):
        await asyncio.gather(*(event.wait() for event in running))
    blow()
    async with asyncio.timeout(_ALL_S):
        return await asyncio.gather(*reading)
