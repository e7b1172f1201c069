"""Names of things, as types of their own, so that a worker's id is never passed where a request's is meant."""

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
EntryId = NewType("EntryId", str)
"""The id that Redis gave to a stream entry: ``"milliseconds-sequence"``."""
BlockId = NewType("BlockId", int)

START = EntryId("0-0")
"""Before the first entry of every stream."""


def entry_key(entry: EntryId) -> tuple[int, int]:
    """Return what entry ids sort by. Raises ValueError for anything but ``"ms-seq"``."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)
