"""Chunked prefills without hybrid batches: the other half of Sarathi-Serve's ablation (§5.4.2)."""

from shared.scheduling.draft import Draft
from shared.scheduling.prefills import feed_prompts


def chunked_only(draft: Draft) -> None:
    """Take turns: a step of prefill chunks, a step of decodes. Who has nothing to do leaves the turn to the other."""
    turns = (_decodes, _prefills) if draft.previous_prefilled else (_prefills, _decodes)
    for turn in turns:
        turn(draft)
        if draft.feeds_anybody:
            return


def _decodes(draft: Draft) -> None:
    for request in draft.running():
        if request.is_decoding:
            draft.extend(request)


def _prefills(draft: Draft) -> None:
    draft.make_way()
    feed_prompts(draft, [request for request in draft.running() if not request.is_decoding])
