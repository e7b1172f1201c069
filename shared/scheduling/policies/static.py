"""Request-level batching: the baseline of every paper (Sarathi-Serve, Algorithm 1)."""

from shared.scheduling.draft import Draft


def static(draft: Draft) -> None:
    """Admit only when nothing runs, then run until the batch's last request ends. Who has ended is skipped."""
    running = draft.running()
    for request in running:
        draft.extend(request)
    if running:
        return
    for request in draft.waiting():
        if not draft.admit(request, whole=True):
            break
