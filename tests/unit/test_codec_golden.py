"""The bytes of every message, as they are on the wire for ever: a change here is a new version of the message."""

import typing

import pytest

from shared.ids import BlockId, EntryId, GatewayId, RequestId, WorkerId
from shared.protocol.codec import decode, encode
from shared.protocol.messages import (
    Bias,
    CancelRequest,
    ClaimWorker,
    Held,
    HeldRequest,
    Logprobs,
    Message,
    NamedBlock,
    NewRequest,
    PlanRefused,
    PoolReport,
    Ranked,
    Registration,
    RequestRefused,
    Resident,
    ResultRow,
    Sampling,
    Slice,
    StepFailed,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenBatch,
    TokenizerFiles,
    TokenRow,
    WorkerSize,
    WorkerState,
)

R, G, W = RequestId("r"), GatewayId("g"), WorkerId("w")
B = BlockId
SUBMIT = SubmitRequest(R, 1, G, (5, 300), 7, Sampling(0.5, 0.9, 40, 123), (9,), EntryId("8-1"), True, -2, True)
SHORT = SubmitRequest(R, 0, G, (5,), 7)
MESSAGES: tuple[Message, ...] = (
    SUBMIT,
    SHORT,
    CancelRequest(R, 2),
    ClaimWorker("nonce"),
    StepPlan(3, 4, (NewRequest(SHORT, EntryId("8-1"), 16, (B(1), B(2))),), (Slice(R, 16, 1, (B(7),)),), (R,), (R,)),
    StepPlan(1, 1),
    WorkerState(
        W, 2, "nonce", WorkerSize(64, 16, 2048), (Resident(SHORT, EntryId("8-1"), (1, 2), 2, (B(3),), "stop"),)
    ),
    StepResult(1, 2, 0.25, (ResultRow(R, 0, (5,), "length"), ResultRow(R, 0, skipped=True))),
    StepFailed(1, 2, "out of memory"),
    PlanRefused(1, 2, 4),
    TokenBatch(W, (TokenRow(R, 1, 5, (70000,), "error"), TokenRow(R, 1, 6, (7,)))),
    Held(EntryId("9-0"), (HeldRequest(R, 1),), PoolReport(1, 2048, 2, 3, 4, 64, 5)),
    Held(None, (), PoolReport()),
    RequestRefused(R, 1, "too_long", "larger than every pool"),
    Registration("worker", "m", "host", 42, "abc"),
    TokenizerFiles(b"{}", "{{ messages }}", (0, 2), {"bos_token": "<s>"}, Sampling(0.6)),
)
EARLIER_BYTES = (
    "9ca87375626d69742f31a17201a1679205cd012c0794cb3fe0000000000000cb3feccccccccccccd287b9109a3382d31c3fec3",
    "9ca87375626d69742f31a17200a16791050794cb3ff0000000000000cb3ff0000000000000000090a0c200c2",
    "93a863616e63656c2f31a17202",
    "92a7636c61696d2f31a56e6f6e6365",
    (
        "97a6706c616e2f31030491949ca87375626d69742f31a17200a16791050794cb3ff0000000000000cb3ff000000000000000"
        "0090a0c200c2a3382d31109201029194a1721001910791a17291a172"
    ),
    "97a6706c616e2f31010190909090",
    (
        "96ae776f726b65722d73746174652f31a17702a56e6f6e6365934010cd080091969ca87375626d69742f31a17200a1679105"
        "0794cb3ff0000000000000cb3ff0000000000000000090a0c200c2a3382d31920102029103a473746f70"
    ),
    "95a8726573756c742f310102cb3fd00000000000009295a172009105a66c656e677468c295a1720090c0c3",
    "94ad737465702d6661696c65642f310102ad6f7574206f66206d656d6f7279",
    "94ae706c616e2d726566757365642f31010204",
    "93a8746f6b656e732f31a1779295a172010591ce00011170a56572726f7295a17201069107c0",
    "94a668656c642f31a3392d309192a172019701cd08000203044005",
    "94a668656c642f31c0909700000000000000",
    "95a9726566757365642f31a17201a8746f6f5f6c6f6e67b66c6172676572207468616e20657665727920706f6f6c",
    "96ae726567697374726174696f6e2f31a6776f726b6572a16da4686f73742aa3616263",
    (
        "96ab746f6b656e697a65722f31c4027b7dae7b7b206d65737361676573207d7d92000281a9626f735f746f6b656ea33c733e"
        "94cb3fe3333333333333cb3ff00000000000000000"
    ),
)
"""As written before any field was appended: such bytes are still read, and mean what they meant."""
SECOND_BYTES = (
    "9ea87375626d69742f31a17201a1679205cd012c0794cb3fe0000000000000cb3feccccccccccccd287b9109a3382d31c3fec3a0a0",
    "9ea87375626d69742f31a17200a16791050794cb3ff0000000000000cb3ff0000000000000000090a0c200c2a0a0",
)
"""The submissions, as written before sampling had penalties."""
THIRD_BYTES = (
    (
        "9fa87375626d69742f31a17201a1679205cd012c079ccb3fe0000000000000cb3feccccccccccccd287bcb00000000000000"
        "00cb0000000000000000cb0000000000000000cb3ff0000000000000009090c09109a3382d31c3fec3a0a0a0"
    ),
    (
        "9fa87375626d69742f31a17200a1679105079ccb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff0000000000000009090c090a0c200c2a0a0a0"
    ),
)
"""The submissions, as written before sampling had a grammar."""
FOURTH_BYTES = (
    (
        "9fa87375626d69742f31a17201a1679205cd012c079dcb3fe0000000000000cb3feccccccccccccd287bcb00000000000000"
        "00cb0000000000000000cb0000000000000000cb3ff0000000000000009090c0a09109a3382d31c3fec3a0a0a0"
    ),
    (
        "9fa87375626d69742f31a17200a1679105079dcb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff0000000000000009090c0a090a0c200c2a0a0a0"
    ),
)
"""The submissions, as written before anything was told of prompts."""
TOKENS_BYTES = (
    "93a8746f6b656e732f31a1779297a172010591ce00011170a56572726f72009097a17201069107c00090",
    "93a8746f6b656e732f31a1779197a17201009107c02090",
    (
        "93a8746f6b656e732f31a1779197a17201009107c0009192cbbfe0000000000000929208cbbfd00000000000009207cbbfe0"
        "000000000000"
    ),
)
"""Tokens, as written before anything was told of prompts."""


@pytest.mark.parametrize(
    ("message", "earlier"),
    [
        *zip(MESSAGES, EARLIER_BYTES, strict=True),
        *zip((SUBMIT, SHORT), SECOND_BYTES, strict=True),
        *zip((SUBMIT, SHORT), THIRD_BYTES, strict=True),
        *zip((SUBMIT, SHORT), FOURTH_BYTES, strict=True),
    ],
)
def test_what_was_written_before_fields_were_appended_is_still_read(message: Message, earlier: str) -> None:
    assert decode(bytes.fromhex(earlier)) == message


LATER: tuple[Message, ...] = (
    SubmitRequest(R, 1, G, (5,), 7, tenant="t", cache_salt="s", shares_with=RequestId("q")),
    WorkerState(W, 2, "n", WorkerSize(64, 16, 2048), hash_key=b"k", named=(NamedBlock(B(3), b"0123456789abcdef"),)),
    WorkerState(W, 2, "n", WorkerSize(64, 16, 2048), (Resident(SHORT, EntryId("8-1"), (), 0, (), preemptions=2),)),
    TokenBatch(W, (TokenRow(R, 1, 0, (7,), None, 32),)),
    SubmitRequest(
        R, 1, G, (5,), 7, Sampling(1, 1, 0, 3, 0.25, 1.5, -2, 1.25, 4, (Bias(5, -100), Bias(300, 0.5)), (8, 9), 20, "g")
    ),
    TokenBatch(W, (TokenRow(R, 1, 0, (7,), logprobs=(Logprobs(-0.5, (Ranked(8, -0.25), Ranked(7, -0.5))),)),)),
    Held(None, (), PoolReport(1, 2048, 2, 3, 4, 64, 5, 6, 70, 80, 90, 10, 11)),
    StepResult(1, 2, 0.25, (), 0.5),
    SubmitRequest(R, 1, G, (5,), 7, Sampling(seed=3, grammar='{"grammars":[]}')),
    SubmitRequest(R, 1, G, (5,), 7, Sampling(logprobs=0, prompt_logprobs=3)),
    TokenBatch(W, (TokenRow(R, 1, 0, (), prompt_first=4, prompt_logprobs=(Logprobs(-0.5, (Ranked(8, -0.25),)),)),)),
)
"""Messages with the fields that were appended."""
BYTES = (
    (
        "9fa87375626d69742f31a17201a1679205cd012c079ecb3fe0000000000000cb3feccccccccccccd287bcb00000000000000"
        "00cb0000000000000000cb0000000000000000cb3ff0000000000000009090c0a0c09109a3382d31c3fec3a0a0a0"
    ),
    (
        "9fa87375626d69742f31a17200a1679105079ecb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff0000000000000009090c0a0c090a0c200c2a0a0a0"
    ),
    "93a863616e63656c2f31a17202",
    "92a7636c61696d2f31a56e6f6e6365",
    (
        "97a6706c616e2f31030491949fa87375626d69742f31a17200a1679105079ecb3ff0000000000000cb3ff000000000000000"
        "00cb0000000000000000cb0000000000000000cb0000000000000000cb3ff0000000000000009090c0a0c090a0c200c2a0a0"
        "a0a3382d31109201029194a1721001910791a17291a172"
    ),
    "97a6706c616e2f31010190909090",
    (
        "98ae776f726b65722d73746174652f31a17702a56e6f6e6365934010cd080091979fa87375626d69742f31a17200a1679105"
        "079ecb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb0000000000000000cb0000000000000000cb"
        "3ff0000000000000009090c0a0c090a0c200c2a0a0a0a3382d31920102029103a473746f7000c40090"
    ),
    "96a8726573756c742f310102cb3fd00000000000009295a172009105a66c656e677468c295a1720090c0c3c0",
    "94ad737465702d6661696c65642f310102ad6f7574206f66206d656d6f7279",
    "94ae706c616e2d726566757365642f31010204",
    "93a8746f6b656e732f31a1779299a172010591ce00011170a56572726f720090019099a17201069107c000900190",
    "94a668656c642f31a3392d309192a172019d01cd08000203044005000000000000",
    "94a668656c642f31c0909d00000000000000000000000000",
    "95a9726566757365642f31a17201a8746f6f5f6c6f6e67b66c6172676572207468616e20657665727920706f6f6c",
    "96ae726567697374726174696f6e2f31a6776f726b6572a16da4686f73742aa3616263",
    (
        "96ab746f6b656e697a65722f31c4027b7dae7b7b206d65737361676573207d7d92000281a9626f735f746f6b656ea33c733e"
        "9ecb3fe3333333333333cb3ff00000000000000000cb0000000000000000cb0000000000000000cb0000000000000000cb3f"
        "f0000000000000009090c0a0c0"
    ),
    (
        "9fa87375626d69742f31a17201a1679105079ecb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff0000000000000009090c0a0c090a0c200c2a174a173a171"
    ),
    "98ae776f726b65722d73746174652f31a17702a16e934010cd080090c4016b919203c41030313233343536373839616263646566",
    (
        "98ae776f726b65722d73746174652f31a17702a16e934010cd080091979fa87375626d69742f31a17200a1679105079ecb3f"
        "f0000000000000cb3ff00000000000000000cb0000000000000000cb0000000000000000cb0000000000000000cb3ff00000"
        "00000000009090c0a0c090a0c200c2a0a0a0a3382d31900090c002c40090"
    ),
    "93a8746f6b656e732f31a1779199a17201009107c020900190",
    (
        "9fa87375626d69742f31a17201a1679105079e01010003cb3fd0000000000000cb3ff8000000000000fecb3ff40000000000"
        "0004929205d09c92cd012ccb3fe000000000000092080914a167c090a0c200c2a0a0a0"
    ),
    (
        "93a8746f6b656e732f31a1779199a17201009107c0009192cbbfe0000000000000929208cbbfd00000000000009207cbbfe0"
        "0000000000000190"
    ),
    "94a668656c642f31c0909d01cd080002030440050646505a0a0b",
    "96a8726573756c742f310102cb3fd000000000000090cb3fe0000000000000",
    (
        "9fa87375626d69742f31a17201a1679105079ecb3ff0000000000000cb3ff00000000000000003cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff0000000000000009090c0af7b226772616d6d617273223a5b5d7dc090a0c200"
        "c2a0a0a0"
    ),
    (
        "9fa87375626d69742f31a17201a1679105079ecb3ff0000000000000cb3ff00000000000000000cb0000000000000000cb00"
        "00000000000000cb0000000000000000cb3ff000000000000000909000a00390a0c200c2a0a0a0"
    ),
    "93a8746f6b656e732f31a1779199a172010090c00090049192cbbfe0000000000000919208cbbfd0000000000000",
)


@pytest.mark.parametrize(
    ("message", "earlier"), list(zip((MESSAGES[10], LATER[3], LATER[5]), TOKENS_BYTES, strict=True))
)
def test_tokens_that_were_written_before_prompts_were_told_of_are_still_read(message: Message, earlier: str) -> None:
    assert decode(bytes.fromhex(earlier)) == message


@pytest.mark.parametrize(("message", "golden"), list(zip((*MESSAGES, *LATER), BYTES, strict=True)))
def test_bytes_of_version_1_never_change(message: Message, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(Message))
