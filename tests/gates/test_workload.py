"""The workload: append-only, round robin, exact sizes, and the same for the same seed."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from gates.workload import (
    Probe,
    Shape,
    make_probes,
    reusable_tokens,
    unique_blocks,
    workload_digest,
)

SHAPE = Shape(sessions=3, turns=4, turn_tokens=200, answer_tokens=8, passkey_tokens=10, seed=5)


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def probes() -> tuple[Probe, ...]:
    return make_probes(SHAPE, encode)


def kind(probes: Sequence[Probe], name: str) -> list[Probe]:
    return [probe for probe in probes if probe.kind == name]


def test_turns_are_interleaved_round_robin_then_replayed_then_asked(
    probes: tuple[Probe, ...],
) -> None:
    grow = [(probe.turn, probe.session) for probe in kind(probes, "grow")]
    assert grow == [(turn, session) for turn in range(1, 5) for session in range(1, 4)]
    rest = [(probe.kind, probe.session) for probe in probes[len(grow) :]]
    assert rest == [(k, session) for k in ("replay", "passkey") for session in range(1, 4)]


def test_every_turn_appends_exactly_its_tokens(probes: tuple[Probe, ...]) -> None:
    for session in range(1, 4):
        turns = [probe.prompt for probe in kind(probes, "grow") if probe.session == session]
        assert [len(prompt) for prompt in turns] == [200, 400, 600, 800]
        for shorter, longer in pairwise(turns):
            assert longer[: len(shorter)] == shorter


def test_replay_is_the_full_prefix_and_the_passkey_lies_in_it(probes: tuple[Probe, ...]) -> None:
    for replay, asked in zip(kind(probes, "replay"), kind(probes, "passkey"), strict=True):
        last = [probe for probe in kind(probes, "grow") if probe.session == replay.session][-1]
        assert replay.prompt == last.prompt == asked.prompt[:800]
        text = bytes(asked.prompt).decode()
        assert asked.passkey is not None
        assert asked.passkey in text[:800]
        assert text.endswith("<|im_start|>assistant\nThe passkey is")
    keys = {probe.passkey for probe in kind(probes, "passkey")}
    assert len(keys) == 3


def test_sessions_share_no_block(probes: tuple[Probe, ...]) -> None:
    firsts = {probe.prompt[:32] for probe in kind(probes, "grow")}
    assert len(firsts) == 3
    assert unique_blocks([probe.prompt for probe in probes], 32) == 3 * (
        len(kind(probes, "passkey")[0].prompt) // 32
    )


def test_a_seed_repeats_and_another_differs(probes: tuple[Probe, ...]) -> None:
    assert make_probes(SHAPE, encode) == probes
    other = make_probes(Shape(3, 4, 200, 8, 10, seed=6), encode)
    assert workload_digest(other) != workload_digest(probes)
    assert workload_digest(make_probes(SHAPE, encode)) == workload_digest(probes)


def test_reusable_tokens_are_full_blocks_and_never_the_whole_prompt() -> None:
    def probe(size: int) -> Probe:
        return Probe(1, 1, "grow", tuple(range(size)), 1)

    assert reusable_tokens([probe(64), probe(64), probe(100), probe(96)], 32) == [0, 32, 64, 64]


def test_a_turn_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turn_tokens = 60 is too small; at least \d+"):
        make_probes(Shape(1, 1, 60, 1, 1), encode)
