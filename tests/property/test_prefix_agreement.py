"""Leader and worker agree on what is in every block, whatever is shared, preempted, cancelled or taken over."""

from hypothesis import note, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.fake_executor import FakeExecutor, fake_next_token
from services.worker.fake_tokenizer import EOS_ID
from shared.ids import BlockId
from shared.scheduling.limits import Limits
from shared.scheduling.policies import POLICIES
from tests.conductor import Conductor, Ids

TEXTS = (
    b"Once upon a time there was a small block of sixteen tokens. " * 4,
    b"Something else entirely, from the start. " * 6,
)
LONGEST = 90


def expected(prompt: Ids, max_tokens: int) -> Ids:
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(fake_next_token(context))
        if context[-1] == EOS_ID:
            break
    return tuple(context[len(prompt) :])


class PrefixMachine(RuleBasedStateMachine):
    """Plans up to three deep. A wrong hit is a refused plan, for the ledger checks names, or a wrong token."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        limits=st.builds(Limits, st.sampled_from([8, 24, 64, 200]), st.integers(2, 6)),
        blocks=st.integers(4, 9),
        depth=st.integers(1, 3),
    )
    def begin(self, *, policy: str, limits: Limits, blocks: int, depth: int) -> None:
        self.conductor = Conductor(FakeExecutor(blocks), (EOS_ID,), limits, policy=policy, depth=depth)
        self.asked: dict[str, tuple[Ids, int, str]] = {}
        self.cancelled: set[str] = set()
        self.claims = 0

    @rule(
        text=st.sampled_from(TEXTS),
        sizes=st.lists(
            st.tuples(
                st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 32, 33, 48])),
                st.sampled_from([1, 4, 20, 40, 60]),
                st.booleans(),
            ),
            min_size=1,
            max_size=5,
        ),
        salt=st.sampled_from(["", "", "", "salt"]),
    )
    def ask(self, *, text: bytes, sizes: list[tuple[int, int, bool]], salt: str) -> None:
        for length, max_tokens, has_own_tail in sizes:
            prompt = tuple(text[:length])
            if has_own_tail:  # shares all but its last token
                prompt = (*prompt[:-1], len(self.asked) % 250)
            self._ask(prompt, max_tokens, salt)

    @precondition(lambda self: any(answer.finish for answer in self.conductor.answers.values()))
    @rule(data=st.data(), more=st.integers(1, 20))
    def next_turn(self, data: st.DataObject, more: int) -> None:
        ended = sorted(name for name, answer in self.conductor.answers.items() if answer.finish)
        name = data.draw(st.sampled_from(ended))
        prompt, _, salt = self.asked[name]
        turn = (*prompt, *self.conductor.text(name), *TEXTS[0][:more])
        if len(turn) <= LONGEST:
            self._ask(turn, 8, salt)

    def _ask(self, prompt: Ids, max_tokens: int, salt: str) -> None:
        if len(prompt) + max_tokens > self.conductor.view.longest:
            return  # refused at the door
        name = f"r{len(self.asked):03}"
        self.asked[name] = (prompt, max_tokens, salt)
        self.conductor.submit(name, prompt, max_tokens, salt=salt)

    @rule(times=st.integers(1, 6))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.conductor.iterate()

    @rule()
    def publish(self) -> None:
        self.conductor.publish()

    @rule()
    def execute(self) -> None:
        self.conductor.execute()

    @rule()
    def hear(self) -> None:
        self.conductor.hear()

    @precondition(lambda self: self.conductor.planner.state.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.conductor.planner.state.requests)))
        self.cancelled.add(name)
        self.conductor.cancel(name)

    @precondition(lambda self: self.asked)
    @rule()
    def another_leader_takes_over(self) -> None:
        self.conductor.claim()

    @invariant()
    def what_the_leader_can_find_the_worker_holds(self) -> None:
        if hasattr(self, "conductor"):
            leaders = self.conductor.view.pool._names
            workers = self.conductor.ledger._blocks.names
            assert leaders.items() <= workers.items()

    def teardown(self) -> None:
        if not hasattr(self, "conductor"):
            return
        self.conductor.run_dry()
        hits = sum(start > 0 for _, start in self.conductor.starts)
        target(float(hits + len(self.conductor.preempted)))
        note(f"{hits} hits, {len(self.conductor.preempted)} preemptions")
        for name, (prompt, max_tokens, _) in self.asked.items():
            full, got = expected(prompt, max_tokens), self.conductor.text(name)
            assert got == full or (name in self.cancelled and got == full[: len(got)]), name
        assert self.conductor.view.pool.used == 0
        tables = self.conductor.ledger._blocks.tables
        assert not any(tables(BlockId(block)) for block in range(self.conductor.view.pool.blocks))


TestPrefixAgreement = PrefixMachine.TestCase
TestPrefixAgreement.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
