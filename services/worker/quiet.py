"""Transformers draws bars and gives advice on standard error; ours are structured events."""

import transformers


def quieten_transformers() -> None:
    """Leave only errors of transformers' own logging."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # transformers leaves it untyped
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call] # likewise
