"""What a supervisor tells the others when it has seen a part of its own end: it knows, they would have to wait."""

import asyncio

import structlog

from services.supervision import Part
from shared.bus.port import Bus, Lease
from shared.errors import BusUnavailable
from shared.protocol import names

_BUS_S = 2.0

log = structlog.get_logger()


class Undertaker:
    """Declares the parts of one model dead."""

    def __init__(self, bus: Bus, model_name: str) -> None:
        self._bus = bus
        self._model_name = model_name

    async def bury(self, part: Part, instance: str) -> None:
        """Declare dead every id that this instance of a part had. If the bus is silent, others find out by expiry."""
        if part.kind is None:
            return
        try:
            async with asyncio.timeout(_BUS_S):
                await self._bury(part.kind, instance)
        except (BusUnavailable, TimeoutError) as error:
            log.warning("death_not_told", part=part.name, error=str(error))

    async def _bury(self, kind: names.Kind, instance: str) -> None:
        stem = f"{kind}-{instance}."
        for part_id in await self._bus.parts(names.members(kind, self._model_name)):
            if part_id.startswith(stem):
                await self._bus.declare_dead(part_id)
                if kind == "scheduler":
                    await self._bus.drop_lease(Lease(names.leader(self._model_name), part_id))
