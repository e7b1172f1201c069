"""Queue orders: who is next in the waiting line, and who of the running gives way. One table names them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shared.scheduling.orders.fair import Fair
from shared.scheduling.orders.fixed import Fixed, by_arrival, by_urgency
from shared.scheduling.orders.port import QueueOrder

ORDERS: Mapping[str, Callable[[], QueueOrder]] = MappingProxyType(
    {
        "fcfs": lambda: Fixed(by_arrival),
        "priority": lambda: Fixed(by_urgency, takes_places=True),
        "fair": Fair,
    }
)
