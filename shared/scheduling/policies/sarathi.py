"""Stall-free batching with chunked prefills (Sarathi-Serve, Algorithm 3)."""

from shared.scheduling.draft import Draft


def sarathi(draft: Draft) -> None:
    """Feed decodes first, then unfinished prefills, then newcomers, within the token budget: no stream ever stalls."""
    running = draft.running()
    decodes = [request for request in running if request.is_decoding]
    prefills = [request for request in running if not request.is_decoding]
    for request in (*decodes, *prefills):
        draft.extend(request)
    for request in draft.waiting():
        if not draft.admit(request):
            break
