"""The lives of one gateway process: an id, a heartbeat, a stream; declared dead, it goes on under a new id."""

import asyncio

import structlog

from services.gateway.reader import Reader
from services.gateway.writer import Writer
from shared.bus.port import Bus, Part
from shared.errors import BusUnavailable, DeclaredDead
from shared.ids import GatewayId
from shared.protocol import names
from shared.runtime.part import Identity, keep_beating, registration

RETRY_S = 0.2

log = structlog.get_logger()


class Lives:
    """Runs one life after the other. Clients stay; whatever is owed is submitted again under the new id."""

    def __init__(self, bus: Bus, model: str, writer: Writer, reader: Reader) -> None:
        self._bus = bus
        self._model = model
        self._writer = writer
        self._reader = reader
        self._identity = Identity("gateway")
        self._part: Part | None = None

    async def run(self) -> None:
        """Live until cancelled."""
        while True:
            await self._begin()
            try:
                await self._live()
            except* DeclaredDead:
                log.warning("declared_dead", part=self._part and self._part.id)

    async def leave(self) -> None:
        """Take this gateway off the list, with its stream."""
        if self._part is not None:
            await self._bus.leave(self._part)

    async def _begin(self) -> None:
        gateway = GatewayId(self._identity.next_life())
        stream = names.tokens(gateway)
        self._part = Part(gateway, names.members("gateway", self._model), (stream,))
        while True:
            if await self._is_registered(self._part):
                break
            await asyncio.sleep(RETRY_S)
        self._writer.gateway = gateway
        self._writer.owed.submit_all_again()
        log.info("registered", part=gateway, model=self._model)

    async def _is_registered(self, part: Part) -> bool:
        """Make the stream and beat once: who submitted before that would be taken for dead."""
        try:
            await self._bus.make_stream(part.streams[0])
            await self._bus.beat(part, registration("gateway", self._model))
        except BusUnavailable as error:
            log.debug("not_registered", part=part.id, error=str(error))
            return False
        return True

    async def _live(self) -> None:
        assert self._part is not None, "a life begins before it is lived"  # noqa: S101 - a bug, not input
        async with asyncio.TaskGroup() as tasks:
            value = registration("gateway", self._model)
            tasks.create_task(keep_beating(self._bus, self._part, value, self._writer.owed.server_forgot))
            tasks.create_task(self._reader.run(GatewayId(self._part.id)))
