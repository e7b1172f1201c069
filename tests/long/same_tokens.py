"""The long form of check 2: twelve prompts of lengths 1 to 600 at once, under every policy, chunk and pool.

Run by hand: ``python -m tests.long.same_tokens "$(slipstream convert)"``.
Prints a line per course; exits non-zero at the first difference.
"""

import sys
import tempfile
from pathlib import Path

from tests.end_to_end.same_tokens import COURSES, asks, run_course


def main(model_folder: Path) -> int:
    """Run every course and say what came of it."""
    wanted = asks(12, max_tokens=64)
    answers = ties = 0
    for course in COURSES:
        with tempfile.TemporaryDirectory() as folder:
            came = run_course(course, wanted, model_folder, Path(folder))
        answers, ties = answers + len(wanted), ties + came.ties
        print(f"{course.name:28} {came.equal} equal, {came.ties} ties, {came.preemptions} preemptions", flush=True)
    print(f"{ties} ties of {answers} answers")
    return int(ties > answers / 100)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
