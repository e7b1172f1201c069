"""``slipstream convert``: fetch and convert a model by hand, and say where it is."""

import sys

from services.worker.model_store import model_folder
from services.worker.progress import Progress
from shared.errors import StartupError
from shared.runtime.process import EXIT_CANNOT_START
from shared.runtime.settings import WorkerSettings


def convert(settings: WorkerSettings) -> int:
    """Print the folder of the settings' model, made first if need be, and return the exit status."""
    try:
        folder = model_folder(settings.model, Progress())
    except StartupError as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return EXIT_CANNOT_START
    sys.stdout.write(f"{folder}\n")
    return 0
