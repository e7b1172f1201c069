"""Policies: who is fed in the next step, and in which order. One file per paper, one signature, one table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shared.scheduling.draft import Draft
from shared.scheduling.policies.chunked_only import chunked_only
from shared.scheduling.policies.hybrid_only import hybrid_only
from shared.scheduling.policies.orca import orca
from shared.scheduling.policies.prefill_first import prefill_first
from shared.scheduling.policies.sarathi import sarathi
from shared.scheduling.policies.static import static


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is filled. One that never cuts a prompt needs a budget that takes the longest prompt whole.

    ``reserves``: its paper sets KV memory aside at admission, so this is its default.
    """

    fill: Callable[[Draft], None]
    cuts_prompts: bool
    reserves: bool = False


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "static": Policy(static, cuts_prompts=False, reserves=True),
        "orca": Policy(orca, cuts_prompts=False, reserves=True),
        "prefill-first": Policy(prefill_first, cuts_prompts=False),
        "chunked-only": Policy(chunked_only, cuts_prompts=True),
        "hybrid-only": Policy(hybrid_only, cuts_prompts=False),
        "sarathi": Policy(sarathi, cuts_prompts=True),
    }
)
