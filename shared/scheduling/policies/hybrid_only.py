"""Hybrid batches without chunks: one half of Sarathi-Serve's ablation (§5.4.2)."""

from shared.scheduling.draft import Draft


def hybrid_only(draft: Draft) -> None:
    """Feed decodes and whole prompts in one step: the first token comes soon, and every stream waits for the prompt."""
    draft.make_way(whole=True)
    for request in draft.running():
        draft.extend(request)
    for request in draft.waiting():
        if not draft.admit(request, whole=True):
            break
