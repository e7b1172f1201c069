"""Stall-free batching with chunked prefills (Sarathi-Serve, Algorithm 3)."""

from shared.scheduling.draft import Draft
from shared.scheduling.prefills import feed_prompts


def sarathi(draft: Draft) -> None:
    """Feed decodes first, then unfinished prefills, then newcomers, within the token budget: no stream ever stalls."""
    draft.make_way()
    running = draft.running()
    for request in running:
        if request.is_decoding:
            draft.extend(request)
    feed_prompts(draft, [request for request in running if not request.is_decoding])
