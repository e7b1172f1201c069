"""Policies: who is fed in the next step, and in which order. One file per paper, one signature, one table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shared.scheduling.draft import Draft
from shared.scheduling.policies.orca import orca
from shared.scheduling.policies.sarathi import sarathi
from shared.scheduling.policies.static import static


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is filled. One that never cuts a prompt needs a budget that takes the longest prompt whole."""

    fill: Callable[[Draft], None]
    cuts_prompts: bool


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "static": Policy(static, cuts_prompts=False),
        "orca": Policy(orca, cuts_prompts=False),
        "sarathi": Policy(sarathi, cuts_prompts=True),
    }
)
