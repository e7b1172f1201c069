"""Who of the running gives way to somebody more urgent who waits (queue orders that take places)."""

from collections import Counter
from collections.abc import Sequence

from shared.ids import BlockId
from shared.scheduling.memory import Memory
from shared.scheduling.orders.port import QueueOrder
from shared.scheduling.request import Request


def may_give_way(victim: Request, head: Request, order: QueueOrder) -> bool:
    """Return whether one who runs is less urgent, and stands further back, than one who waits."""
    is_possible = victim.priority > head.priority and not victim.is_protected
    return is_possible and order.place(victim) > order.place(head)


def victims_for(
    head: Request, running: Sequence[Request], memory: Memory, order: QueueOrder, *, seats_lacking: int
) -> list[Request] | None:
    """Return who must give way so that the next in line can begin: from the least urgent on, no more than needed.

    None if not even all of them would do. A block that victims share is free when the last of them has gone, and one
    that the head will share is not.
    """
    found = memory.found(head)
    kept = frozenset(found)
    lacking = memory.lacking(head, found, others=0)
    candidates = (request for request in reversed(running) if may_give_way(request, head, order))
    victims: list[Request] = []
    given: Counter[BlockId] = Counter()
    while len(victims) < seats_lacking or lacking + memory.kept_free(len(running) - len(victims)) > 0:
        victim = next(candidates, None)
        if victim is None:
            return None
        victims.append(victim)
        given.update(victim.blocks)
        lacking -= sum(given[block] == memory.pool.holders(block) for block in victim.blocks if block not in kept)
    return victims
