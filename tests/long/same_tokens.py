"""The long form of check 2: twelve prompts of lengths 1 to 600 at once, under every policy, chunk and pool;
then twelve at once with KV memory for three, under every policy (check 5 of the papers).

Run by hand: ``python -m tests.long.same_tokens "$(slipstream convert)"``.
Prints a line per course; exits non-zero at the first difference.
"""

import sys
import tempfile
from pathlib import Path

from tests.end_to_end.same_tokens import COURSES, CROWDED, Ask, Came, Course, asks, crowd, run_course


def main(model_folder: Path) -> int:
    """Run every course and say what came of it."""
    mixed, dozen = asks(12, max_tokens=64), crowd(12, max_tokens=64)
    answers = ties = 0
    for course, wanted in (*((course, mixed) for course in COURSES), *((course, dozen) for course in CROWDED)):
        came = _run(course, wanted, model_folder)
        answers, ties = answers + len(wanted), ties + came.ties
        worst = max(came.preempted.values(), default=0)
        memory = f"memory for {course.holds}" if course.holds else "ample memory"
        print(
            f"{course.name:28} {memory:14} {came.equal} equal, {came.ties} ties, {came.preemptions} preemptions, "
            f"at most {worst} of one request",
            flush=True,
        )
    print(f"{ties} ties of {answers} answers")
    return int(ties > answers / 100)


def _run(course: Course, wanted: list[Ask], model_folder: Path) -> Came:
    with tempfile.TemporaryDirectory() as folder:
        return run_course(course, wanted, model_folder, Path(folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
