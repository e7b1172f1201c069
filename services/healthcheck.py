"""`slipstream healthcheck`: whether the part that this host should run is alive, as the others see it."""

import asyncio
import socket
import sys

from shared.bus.redis_bus import RedisBus
from shared.errors import ServingError
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import Registration
from shared.runtime.settings import HealthcheckSettings

_ANSWER_S = 3.0


def healthcheck(settings: HealthcheckSettings) -> int:
    """Return 0 if Redis holds a living registration of the kind from this host, else say why not and return 1."""
    complaint = asyncio.run(_complaint(settings))
    if complaint is None:
        return 0
    sys.stderr.write(f"slipstream: {complaint}\n")
    return 1


async def _complaint(settings: HealthcheckSettings) -> str | None:
    try:
        hosts = await _hosts(settings)
    except ServingError as error:
        return str(error)
    if socket.gethostname() in hosts:
        return None
    return (
        f"no {settings.kind} of this host serves {settings.model_name!r} (hosts that do: {', '.join(hosts) or 'none'})"
    )


async def _hosts(settings: HealthcheckSettings) -> list[str]:
    bus = RedisBus(settings.redis_url, answer_s=_ANSWER_S)
    try:
        registrations = await bus.parts(names.members(settings.kind, settings.model_name))
    finally:
        await bus.close()
    decoded = [decode(registration) for registration in registrations.values()]
    return sorted({one.host for one in decoded if isinstance(one, Registration)})
