"""Which requests were good: those whose user got every token as soon as was promised."""

from dataclasses import dataclass

from loadgen.client import Record
from loadgen.measure import Timing, time_of


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a good request keeps, in seconds; None bounds nothing. Failures and clients that leave are never good.

    TTFT counts from the moment its user wanted the request sent, so that a client that falls behind makes nothing
    good. TBT bounds every token after the first, not their mean: a stall is a stall. TPOT bounds the mean.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    tpot_s: float | None = None

    def are_met_by(self, record: Record) -> bool:
        """Tell whether a request was good."""
        if record.outcome != "ok":
            return False
        timing = time_of(record)
        return self._ttft_met(timing) and self._tbt_met(timing) and self._tpot_met(timing)

    def _ttft_met(self, timing: Timing) -> bool:
        seen_s = timing.ttft_from_intended_s
        return self.ttft_s is None or (seen_s is not None and seen_s <= self.ttft_s)

    def _tbt_met(self, timing: Timing) -> bool:
        if self.tbt_s is None:
            return True
        # chunks of unknown size leave it open: what cannot be told is not good
        return timing.tokens_known_by != "unknown" and all(gap.per_token_s <= self.tbt_s for gap in timing.gaps)

    def _tpot_met(self, timing: Timing) -> bool:
        # an answer of one token has no time between tokens to bound
        return self.tpot_s is None or timing.tpot_s is None or timing.tpot_s <= self.tpot_s
