"""What the command ``loadgen`` runs: an interruption while the packages are still being loaded is one word, too."""

import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from loadgen import cli  # noqa: PLC0415 - loading it takes most of a second, in which a user may interrupt

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("loadgen: interrupted\n")
        return EXIT_INTERRUPTED
