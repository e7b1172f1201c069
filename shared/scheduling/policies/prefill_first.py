"""Prefills before decodes: iteration-level scheduling as early vLLM did it (Sarathi-Serve, Algorithm 2)."""

from shared.scheduling.draft import Draft


def prefill_first(draft: Draft) -> None:
    """Fill the step with whole prompts if anybody can be admitted, else with decodes: who streams stalls meanwhile."""
    draft.make_way()
    for request in draft.waiting():
        if not draft.admit(request, whole=True):
            break
    if not draft.feeds_anybody:
        for request in draft.running():
            draft.extend(request)
