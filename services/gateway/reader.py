"""The one task that reads this gateway's stream: tokens, refusals, lists of what is held."""

import asyncio

import structlog

from services.gateway.metrics import Metrics
from services.gateway.owed import Owed
from services.gateway.pool import Pool
from shared.bus.port import Bus, Entry
from shared.errors import BusUnavailable, ProtocolError
from shared.ids import START, GatewayId
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import Held, Message, RequestRefused, TokenBatch
from shared.runtime.clock import Clock

BLOCK_S = 2.0
RETRY_S = 0.2
TRIM_ENTRIES = 64
"""Applied entries after which the stream is trimmed even if more are waiting."""

log = structlog.get_logger()


class Reader:
    """Applies entries in order and trims what was applied."""

    def __init__(self, bus: Bus, owed: Owed, pool: Pool, metrics: Metrics, clock: Clock) -> None:
        self._bus = bus
        self._owed = owed
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._is_silent = False

    async def run(self, gateway: GatewayId) -> None:
        """Read one life's stream until cancelled. An unanswered read is tried again from the same place."""
        stream = names.tokens(gateway)
        cursor, untrimmed = START, 0
        while True:
            try:
                entries = await self._bus.read({stream: cursor}, block_s=BLOCK_S)
                self._pool.bus_answered_s = self._clock()
                self._is_silent = False
                for entry in entries:
                    await self._apply(entry)
                    cursor = entry.id
                untrimmed += len(entries)
                if untrimmed >= TRIM_ENTRIES or (untrimmed and not entries):
                    await self._bus.trim(stream, cursor)
                    untrimmed = 0
            except BusUnavailable as error:
                self._say_silent(error)
                await asyncio.sleep(RETRY_S)

    async def _apply(self, entry: Entry) -> None:
        try:
            message = decode(entry.data)
            known = self._hear(message)
        except ProtocolError as error:
            await self._give_up(entry, str(error))
            return
        if not known:
            await self._give_up(entry, f"a gateway does not take {type(message).__name__}")

    def _hear(self, message: Message) -> bool:
        match message:
            case TokenBatch():
                self._metrics.generated(self._owed.hear_tokens(message, self._clock()))
            case Held():
                self._pool.heard(message.report, self._clock())
                self._metrics.reported(message.report)
                self._owed.hear_held(message)
            case RequestRefused():
                self._owed.hear_refused(message)
            case _:
                return False
        return True

    async def _give_up(self, entry: Entry, error: str) -> None:
        self._metrics.unreadable()
        log.error("unreadable_message", stream=entry.stream, entry=entry.id, error=error)
        await self._bus.dead_letter(entry, error)

    def _say_silent(self, error: BusUnavailable) -> None:
        if not self._is_silent:
            log.warning("read_unanswered", error=str(error))
        self._is_silent = True
