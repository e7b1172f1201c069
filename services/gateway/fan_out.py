"""One body, made into the requests that workers are asked to answer. Pure: the draw of a seed is passed in."""

from dataclasses import dataclass

from services.gateway.answer import NOBODY, Answer, Wanted
from services.gateway.asked import Prompts, answers_each, check_least, limits_of, stops_of, told_logprobs
from services.gateway.asked_sampling import sampling_of, sampling_of_choice
from services.gateway.asked_tools import ToolUse, tool_use_of
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.choices import Choices
from services.gateway.deadlines import Deadline
from services.gateway.echo import Echo, echoes_of
from services.gateway.ongoing import Ongoing
from services.gateway.tenants import Tenant
from services.gateway.tokenizer import AnswerText, ModelTokenizer
from services.gateway.told import Telling
from services.gateway.tool_calls import CallParser
from services.gateway.tool_reading import Reading
from shared.ids import RequestId
from shared.protocol.messages import Sampling


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What is known of a request beside its body."""

    request: RequestId
    tenant: Tenant
    started_s: float


@dataclass(frozen=True, slots=True)
class FanOut:
    """What all answers to one body have in common."""

    body: ChatBody | CompletionBody
    newcomer: Newcomer
    tokenizer: ModelTokenizer
    length_served: int
    drawn_seed: int

    def choices(self, prompts: Prompts) -> Choices:
        """Return all answers. Raises RequestRejected if one of them cannot be given."""
        each = answers_each(self.body)
        echoes = echoes_of(self.body, prompts, self.tokenizer)
        sampling = sampling_of(self.body, self.tokenizer, self.drawn_seed)
        wanted: list[Wanted] = []
        for prompt_ids in prompts:
            first = NOBODY
            for choice in range(each):
                number = len(wanted) if len(prompts) * each > 1 else None
                wanted.append(self._wanted(prompt_ids, sampling_of_choice(sampling, choice), number, first))
                first = first or wanted[-1].request
        tools, deadline = tool_use_of(self.body, self.tokenizer), self._deadline()
        ongoings = [self._ongoing(one, tools, deadline, echoes[number // each]) for number, one in enumerate(wanted)]
        return Choices(self.newcomer.request, ongoings, n=self.body.n, each=each)

    def _deadline(self) -> Deadline | None:
        timeout_s = self.body.timeout
        return None if timeout_s is None else Deadline(self.newcomer.started_s + timeout_s, timeout_s)

    def _wanted(self, prompt_ids: tuple[int, ...], sampling: Sampling, number: int | None, first: RequestId) -> Wanted:
        body, request = self.body, self.newcomer.request
        max_tokens = limits_of(body, self.length_served).max_tokens(len(prompt_ids))
        check_least(body, max_tokens)
        return Wanted(
            request if number is None else RequestId(f"{request}/{number}"),
            prompt_ids,
            max_tokens,
            sampling,
            body.ignore_eos and not sampling.grammar,  # a grammar decides where the answer ends
            self.tokenizer.eos_ids,
            priority=body.priority,
            tenant=self.newcomer.tenant.name,
            cache_salt=body.cache_salt or "",
            shares_with=first,
        )

    def _ongoing(self, wanted: Wanted, tools: ToolUse | None, deadline: Deadline | None, echo: Echo | None) -> Ongoing:
        detokenizer = self.tokenizer.detokenizer(keeps_marks=tools is not None)
        text = AnswerText(detokenizer, stops_of(self.body), min_tokens=self.body.min_tokens)
        before = len(echo.text) if echo else 0
        telling = None if told_logprobs(self.body) is None else Telling(self.tokenizer.texts, before=before)
        ongoing = Ongoing(Answer(wanted), text, started_s=self.newcomer.started_s, telling=telling)
        ongoing.deadline, ongoing.echo = deadline, echo
        if tools is not None:
            ongoing.reading = Reading(CallParser(tools.layout, tools.names, most=tools.most), tools.layout)
        return ongoing
