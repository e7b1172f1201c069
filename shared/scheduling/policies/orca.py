"""Iteration-level scheduling (ORCA, Algorithm 1; with several stages as many disjoint batches are in flight)."""

from shared.scheduling.draft import Draft


def orca(draft: Draft) -> None:
    """Select by arrival, whole prompts; a head that does not fit stops the scan, so nobody overtakes."""
    draft.make_way(whole=True)
    for request in draft.running():  # before all who wait, whom they precede: nobody is admitted before an earlier one
        draft.extend(request)
    for request in draft.waiting():
        if not draft.admit(request, whole=True):
            break
