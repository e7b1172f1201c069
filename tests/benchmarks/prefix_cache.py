"""What the prefix cache is worth to the second turn of a chat, on a running server: TTFT warm beside cold.

Run from the root of the project: ``python -m tests.benchmarks.prefix_cache [--url URL] [--dtype D] ...``. Without
``--url`` it starts ``slipstream up`` with the default model on a free port. Ends within three minutes.

All chats of one length have the system prompt in common and a ``cache_salt`` that no other run has; their questions
differ. The second turn is asked under the same salt, so that the first turn with its answer is found (warm), and under
a salt that nobody has used (cold); each is first every other time. All is greedy, so that both must say the same: in
float32 to the token, else near ties may fall either way.
"""

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.processes import slipstream_up

SECONDS_BY_TOKENS = {100: 20.0, 500: 35.0, 1500: 75.0}
"""Lengths of system prompts, and how long each may take: on a slow machine later rounds are left out, and the last
column says how many there were."""
ROUNDS = 7
READY_S = 50.0
FIRST_TOKENS, SECOND_TOKENS = 16, 16
SENTENCES = (
    "You answer questions about geography in one short sentence. ",
    "You never guess, and you say so when you do not know. ",
    "Rivers, mountains and capitals are what people ask about most. ",
    "Numbers are given in metric units, years by the common calendar. ",
)
HEAD = "| system prompt | prompt tokens | cached | cold, ms | warm, ms | ratio | same |\n|---|---|---|---|---|---|---|"
Messages = list[ChatCompletionMessageParam]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: seconds from sending to its first text (its end, if it has none), what it said, what was counted."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Chats:
    """All rounds of one length."""

    system_tokens: int
    warm: list[Turn] = field(default_factory=list)
    cold: list[Turn] = field(default_factory=list)

    @property
    def same(self) -> int:
        """Rounds in which warm and cold said the same."""
        return sum(warm.text == cold.text for warm, cold in zip(self.warm, self.cold, strict=True))

    def row(self) -> str:
        """Return a line of the table."""
        warm_ms, cold_ms = (statistics.median(turn.ttft_s for turn in turns) * 1000 for turns in (self.warm, self.cold))
        cells = (
            f"about {self.system_tokens:,}",
            f"{statistics.median(turn.prompt_tokens for turn in self.warm):,.0f}",
            f"{statistics.median(turn.cached_tokens for turn in self.warm):,.0f}",
            f"{cold_ms:.1f}",
            f"{warm_ms:.1f}",
            f"{cold_ms / warm_ms:.1f}",
            f"{self.same} of {len(self.warm)}",
        )
        return "| " + " | ".join(cells) + " |"


class Server:
    """A server and its first model, asked greedily."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, messages: Messages, salt: str, max_tokens: int) -> Turn:
        """Return one answer, streamed."""
        begun_s = time.perf_counter()
        first_s: float | None = None
        text = ""
        usage = None
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": salt},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            new = "".join(choice.delta.content or "" for choice in chunk.choices)
            has_ended = any(choice.finish_reason for choice in chunk.choices)  # an answer may have no text at all
            if first_s is None and (new or has_ended):
                first_s = time.perf_counter()
            text += new
        if first_s is None or usage is None or usage.prompt_tokens_details is None:
            raise AssertionError(f"an answer without an end or usage: {text!r}, {usage}")
        return Turn(first_s - begun_s, text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)


async def system_prompt(server: Server, tokens: int) -> str:
    """Return a system prompt of about so many tokens, by what the server counts for a hundred sentences."""

    async def counted(sentences: int) -> int:
        prompt: Messages = [{"role": "system", "content": text_of(sentences)}, {"role": "user", "content": "Hello."}]
        return (await server.ask(prompt, secrets.token_hex(8), 1)).prompt_tokens

    few, more = await counted(4), await counted(8)
    return text_of(max(1, round(tokens / ((more - few) / 4))))


def text_of(sentences: int) -> str:
    """Return so many sentences."""
    return "".join(SENTENCES[index % len(SENTENCES)] for index in range(sentences)).strip()


async def hold_chats(server: Server, tokens: int, rounds: int) -> Chats:
    """Hold one chat after another and return their second turns. Raises SystemExit if not one could be held in time."""
    chats = Chats(tokens)
    try:
        async with asyncio.timeout(SECONDS_BY_TOKENS[tokens]):
            system = await system_prompt(server, tokens)
            salt = secrets.token_hex(8)
            for _ in range(rounds):
                await hold_chat(server, system, salt, chats)
    except TimeoutError:
        if not chats.warm:
            raise SystemExit(f"not one chat with {tokens} tokens of system prompt in time") from None
    return chats


async def hold_chat(server: Server, system: str, salt: str, chats: Chats) -> None:
    """Hold one chat of two turns, the second one warm and cold."""
    number = len(chats.warm)
    messages: Messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"What is the capital of country number {number} of the alphabet?"},
    ]
    salts = {"warm": salt, "cold": secrets.token_hex(8)}
    first = await server.ask(messages, salt, FIRST_TOKENS)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And which river flows through it?"},
    ]
    order = ("warm", "cold") if number % 2 else ("cold", "warm")
    turns = {name: await server.ask(messages, salts[name], SECOND_TOKENS) for name in order}
    chats.warm.append(turns["warm"])
    chats.cold.append(turns["cold"])


def check(chats: Chats, *, is_exact: bool) -> None:
    """Raise SystemExit if there is nothing to be seen, or something that must not be."""
    if any(turn.cached_tokens for turn in chats.cold):
        raise SystemExit("a cold turn found something")
    if not all(turn.cached_tokens for turn in chats.warm):
        raise SystemExit("a warm turn found nothing")
    if is_exact and chats.same < len(chats.warm):
        raise SystemExit(
            f"in float32 only {chats.same} of {len(chats.warm)} second turns said warm what they said cold"
        )


@asynccontextmanager
async def server_at(url: str) -> AsyncIterator[Server]:
    """Give the server at a URL."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        models = await client.models.list()
        yield Server(client, models.data[0].id)


async def measure(url: str, rounds: int, *, is_exact: bool) -> None:
    """Print the table."""
    async with server_at(url.rstrip("/")) as server:
        await server.ask([{"role": "user", "content": "Hello."}], secrets.token_hex(8), 4)  # the first is slow
        print("Medians of the second turn's TTFT; `same`: greedy text warm = cold\n")
        print(HEAD)
        for tokens in SECONDS_BY_TOKENS:
            chats = await hold_chats(server, tokens, rounds)
            print(chats.row(), flush=True)
            check(chats, is_exact=is_exact)


@contextmanager
def started(*flags: str) -> Iterator[str]:
    """Start a server of our own and give its URL."""
    with tempfile.TemporaryDirectory() as folder, slipstream_up(Path(folder), *flags) as up:
        host, port = up.until_ready(within_s=READY_S).address
        yield f"http://{host}:{port}"


def main() -> None:
    """Measure the server that is named, or one of our own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; else one is started")
    parser.add_argument("--dtype", default="auto", help="of the server that is started, or runs at --url")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, help="of the server that is started: one on a machine that is not quiet")
    given = parser.parse_args()
    is_exact = given.dtype == "float32"
    if given.url:
        asyncio.run(measure(given.url, given.rounds, is_exact=is_exact))
    else:
        threads = () if given.threads is None else ("--threads", str(given.threads))
        with started("--dtype", given.dtype, *threads) as url:
            asyncio.run(measure(url, given.rounds, is_exact=is_exact))


if __name__ == "__main__":
    main()
