"""Finds the tokenizer that the living workers published, and follows when they change it."""

import asyncio
from collections.abc import Callable

import structlog

from services.gateway.pool import Pool
from services.gateway.tokenizer import ModelTokenizer
from shared.bus.port import Bus
from shared.errors import BusUnavailable, ProtocolError
from shared.protocol import names
from shared.protocol.codec import decode_as
from shared.protocol.messages import Registration, TokenizerFiles
from shared.runtime.clock import monotonic, until_next
from shared.runtime.threads import Threads

FIRST_POLL_S = 0.2
POLL_S = 1.0

log = structlog.get_logger()


class TokenizerFinder:
    """Keeps `Pool.tokenizer` at what the workers registered. One that is in use stays while any worker has it."""

    def __init__(self, bus: Bus, model: str, pool: Pool, *, on_first: Callable[[], None] = lambda: None) -> None:
        self._bus = bus
        self._on_first = on_first
        self._members = names.members("worker", model)
        self._pool = pool
        self._loaded = ""
        self._loading = Threads(1, "tokenizer")
        self._broken: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self._look()
            except BusUnavailable as error:
                log.debug("tokenizer_not_looked_up", error=str(error))
            await asyncio.sleep(until_next(POLL_S if self._loaded else FIRST_POLL_S, monotonic()))

    async def _look(self) -> None:
        published = self._hashes(await self._bus.parts(self._members))
        if not published or self._loaded in published:
            return
        content_hash = published[0]
        data = await self._bus.get(names.tokenizer(content_hash))
        if data is None:
            return
        try:
            # In a thread: a large vocabulary takes a second to load, and /health must answer meanwhile.
            tokenizer = await asyncio.get_running_loop().run_in_executor(self._loading, _load, data)
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for files that it cannot read
            self._broken.add(content_hash)
            log.error("tokenizer_unreadable", hash=content_hash, error=str(error))  # noqa: TRY400 - no bug of ours
            return
        if not self._loaded:
            self._on_first()  # before anybody is served
        self._pool.tokenizer = tokenizer
        self._loaded = content_hash
        log.info("tokenizer_loaded", hash=content_hash, vocabulary=tokenizer.vocabulary)

    def _hashes(self, registrations: dict[str, bytes]) -> list[str]:
        found = []
        for worker in sorted(registrations):
            try:
                content_hash = decode_as(Registration, registrations[worker]).tokenizer
            except ProtocolError as error:
                log.warning("registration_unreadable", worker=worker, error=str(error))
                continue
            if content_hash and content_hash not in self._broken:
                found.append(content_hash)
        return found


def _load(data: bytes) -> ModelTokenizer:
    return ModelTokenizer(decode_as(TokenizerFiles, data))
