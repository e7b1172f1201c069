"""What the gateway does about news: orders in the outbox, ends of answers."""

from collections.abc import Iterable

from services.gateway.answer import Answer, Wanted
from services.gateway.ongoing import Ongoing
from services.gateway.outbox import Cancel, Order, Outbox, Submit
from services.gateway.owed import Owed
from services.gateway.tokenizer import AnswerText, ModelTokenizer
from services.worker.fake_tokenizer import fake_tokenizer_files
from shared.errors import GenerationFailed, NotServing, PromptTooLong
from shared.ids import EntryId, RequestId, WorkerId
from shared.protocol.messages import Held, HeldRequest, PoolReport, RequestRefused, Sampling, TokenBatch, TokenRow

TOKENIZER = ModelTokenizer(fake_tokenizer_files())
R = RequestId("r")
W1, W2 = WorkerId("w1"), WorkerId("w2")
FAR = EntryId("99-0")


class Rig:
    """One request that is owed, and written at 1-0."""

    def __init__(self, *stops: str) -> None:
        self.outbox = Outbox()
        self.owed = Owed(self.outbox)
        wanted = Wanted(R, (1, 2), 10, Sampling(), ignore_eos=False, eos_ids=TOKENIZER.eos_ids)
        self.one = Ongoing(Answer(wanted), AnswerText(TOKENIZER.detokenizer(), stops), started_s=0.0)
        self.owed.add(self.one)
        self.drain()
        self.written("1-0")

    def written(self, entry: str) -> None:
        self.one.answer.is_sent = True
        self.one.answer.submitted(self.one.answer.attempt, EntryId(entry))

    def tokens(self, text: bytes, *, first: int = 0, worker: WorkerId = W1, finish: str | None = None) -> int:
        row = TokenRow(R, self.one.answer.attempt, first, tuple(text), finish)  # type: ignore[arg-type]  # a literal
        return self.owed.hear_tokens(TokenBatch(worker, (row,)), 1.0)

    def held(self, *pairs: tuple[str, int], read_to: EntryId | None = FAR) -> None:
        held = tuple(HeldRequest(RequestId(request), attempt) for request, attempt in pairs)
        self.owed.hear_held(Held(read_to, held, PoolReport(workers=1, length_served=100)))

    def drain(self) -> list[Order]:
        return list(self._orders())

    def _orders(self) -> Iterable[Order]:
        while len(self.outbox):
            taking = self.outbox.take().send
            try:
                taking(None)
            except StopIteration as done:
                yield done.value


def test_a_held_request_is_left_alone_however_often_it_is_listed() -> None:
    rig = Rig()
    for _ in range(5):
        rig.held(("r", 1))
    assert rig.drain() == []


def test_a_request_that_was_read_and_is_not_held_is_submitted_again() -> None:
    rig = Rig()
    rig.held()
    assert rig.drain() == [Submit(R)]
    assert rig.one.answer.attempt == 2
    rig.held()
    assert rig.drain() == [], "the second attempt is not written yet"


def test_a_list_of_a_leader_that_has_not_read_yet_is_a_sign_of_life_only() -> None:
    rig = Rig()
    rig.held(read_to=None)
    rig.held(read_to=EntryId("0-9"))
    assert rig.drain() == []


def test_what_is_held_and_not_owed_is_cancelled() -> None:
    rig = Rig()
    rig.held(("r", 1), ("stranger", 4))
    assert rig.drain() == [Cancel(RequestId("stranger"), 4)]


def test_what_has_just_ended_is_not_cancelled_by_a_list_from_before() -> None:
    rig = Rig()
    rig.tokens(b"hi", finish="length")
    rig.held(("r", 1))
    assert rig.drain() == []
    rig.held(("r", 1))
    assert rig.drain() == [Cancel(R, 1)], "by the next list the leader should know"


def test_a_gap_and_a_second_worker_lose_the_attempt_and_no_token_is_taken_twice() -> None:
    rig = Rig()
    assert rig.tokens(b"ab") == 2
    assert rig.tokens(b"zz", first=5) == 0
    assert rig.drain() == [Submit(R)]
    rig.written("2-0")
    assert rig.tokens(b"c", first=2) == 1
    assert rig.tokens(b"d", first=3, worker=W2) == 0
    assert rig.drain() == [Submit(R)]
    assert rig.one.answer.output_ids == list(b"abc")


async def test_three_fruitless_attempts_end_with_an_error_and_a_cancellation() -> None:
    rig = Rig()
    for entry in ("2-0", "3-0"):
        rig.held()
        rig.written(entry)
    rig.drain()
    rig.held()
    assert rig.drain() == [Cancel(R, 3)]
    news = await rig.one.news()
    assert isinstance(news.error, GenerationFailed)
    assert len(rig.owed) == 0


async def test_a_lost_answer_that_is_already_whole_is_finished_here() -> None:
    rig = Rig()
    rig.tokens(b"0123456789")
    rig.held()
    assert rig.drain() == [Cancel(R, 1)]
    news = await rig.one.news()
    assert (news.text, news.finish) == ("0123456789", "length")


async def test_a_stop_string_cancels_the_computation() -> None:
    rig = Rig("END")
    rig.tokens(b"so END of it")
    assert rig.drain() == [Cancel(R, 1)]
    assert (await rig.one.news()).text == "so "


def test_an_answer_that_ends_by_itself_needs_no_cancellation() -> None:
    rig = Rig("END")
    rig.tokens(b"so END", finish="length")
    assert rig.drain() == []
    assert len(rig.owed) == 0


async def test_a_refusal_of_the_present_attempt_is_an_error() -> None:
    rig = Rig()
    rig.owed.hear_refused(RequestRefused(R, 7, "too_long", "not mine"))
    assert len(rig.owed) == 1
    rig.owed.hear_refused(RequestRefused(R, 1, "too_long", "larger than every pool"))
    news = await rig.one.news()
    assert isinstance(news.error, PromptTooLong)
    assert str(news.error) == "larger than every pool"
    other = Rig()
    other.owed.hear_refused(RequestRefused(R, 1, "no_worker", "no worker for 60 s"))
    assert isinstance((await other.one.news()).error, NotServing)


def test_an_abandoned_answer_is_cancelled_once_and_what_was_never_written_is_taken_back() -> None:
    rig = Rig()
    rig.owed.abandon(R)
    rig.owed.abandon(R)
    assert rig.drain() == [Cancel(R, 1)]
    unwritten = Rig()
    unwritten.one.answer.is_sent = False
    unwritten.outbox.submit(R)
    unwritten.owed.abandon(R)
    assert unwritten.drain() == []


def test_a_new_life_submits_again_what_was_written_and_only_that() -> None:
    rig = Rig()
    rig.owed.submit_all_again()
    assert (rig.drain(), rig.one.answer.attempt) == ([Submit(R)], 2)
    rig.owed.submit_all_again()
    assert (rig.drain(), rig.one.answer.attempt) == ([], 2)


def test_tokens_of_strangers_are_dropped() -> None:
    rig = Rig()
    assert rig.owed.hear_tokens(TokenBatch(W1, (TokenRow(RequestId("x"), 1, 0, (1,)),)), 0.0) == 0


def test_an_outbox_holds_each_order_once_and_a_cancellation_takes_a_submission_with_it() -> None:
    rig = Rig()
    rig.outbox.submit(R)
    rig.outbox.submit(R)
    rig.outbox.cancel(R, 1)
    rig.outbox.cancel(R, 2)
    assert rig.drain() == [Cancel(R, 2)]


def test_an_order_that_was_not_carried_out_comes_first_again_unless_a_newer_one_replaced_it() -> None:
    rig = Rig()
    rig.outbox.cancel(RequestId("b"), 1)
    rig.outbox.put_back(Cancel(RequestId("a"), 1))
    rig.outbox.put_back(Cancel(RequestId("b"), 0))
    assert rig.drain() == [Cancel(RequestId("a"), 1), Cancel(RequestId("b"), 1)]


def test_after_a_server_that_forgot_what_brought_no_token_is_written_again_as_the_same_attempt() -> None:
    rig = Rig()
    rig.owed.server_forgot()
    assert rig.drain() == [Submit(R)]
    assert rig.one.answer.attempt == 1
    rig.held(("r", 1), read_to=EntryId("0-1"))
    assert rig.drain() == []


def test_after_a_server_that_forgot_a_running_request_is_lost_only_if_it_is_not_held() -> None:
    rig = Rig()
    rig.tokens(b"ab")
    rig.owed.server_forgot()
    assert rig.drain() == [], "a worker runs it"
    rig.held(("r", 1), read_to=EntryId("0-0"))
    assert rig.drain() == []
    rig.held(read_to=EntryId("0-0"))  # its entry was beyond this on the old server
    assert rig.drain() == [Submit(R)]
    assert rig.one.answer.attempt == 2


def test_a_submission_that_is_being_written_while_the_server_is_found_to_have_forgotten_is_not_written_twice() -> None:
    rig = Rig()
    rig.one.answer.entry = None
    rig.owed.server_forgot()
    assert rig.drain() == []
