"""Run a command whose life is bound to its parent's: ``bound_child.py PARENT_PID COMMAND…``.

The kernel sends the command SIGKILL when the thread that started it ends, even if that was a ``kill -9``. The wish
survives ``exec`` but not ``fork``, so it must be made between the two: this file is run there, alone, by an interpreter
without site-packages, and becomes the command. Other systems than Linux have nothing like it: there the command runs
unbound, and whoever kills the parent with ``kill -9`` must end its parts himself.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bound(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line that runs a command bound to this process."""
    if sys.platform != "linux":
        return command
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command)  # noqa: PTH100 - pathlib would double the time that this file takes to run


def main() -> None:
    """Bind this process to its parent and become the command; end at once if the parent is gone already."""
    import ctypes  # noqa: PLC0415 - the supervisor, which imports `bound`, has no use for it

    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the command line is the supervisor's own


if __name__ == "__main__":
    main()
