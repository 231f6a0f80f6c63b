"""Traces: what is shared, in which order requests come, and what is counted."""

import pickle

import pytest

from evoke_core.replay import TraceBuilder, TraceError, concatenate
from evoke_core.replay.trace import HEAD


def test_equal_contents_behind_the_same_block_are_one_block() -> None:
    builder = TraceBuilder("t", 4)
    first = builder.extend(HEAD, "abc")
    again = builder.extend(HEAD, "abx")
    elsewhere = builder.extend(HEAD, "xbc")
    assert first[:2] == again[:2]
    assert first[2] != again[2]
    assert not set(first) & set(elsewhere)  # the same text behind another prefix is another block
    assert builder.extend(first[1], "c") == [first[2]]


def test_requests_come_in_order_of_time_and_ties_in_order_of_insertion() -> None:
    builder = TraceBuilder("t", 4)
    chains = [builder.extend(HEAD, text) for text in ("ab", "cd", "ce")]
    builder.add(5.0, chains[0], request_id="late", session="s", role="user")
    builder.add(1.0, chains[1], request_id="first")
    builder.add(1.0, chains[2], request_id="second")
    trace = builder.build()
    assert trace.ids == ["first", "second", "late"]
    assert [trace.chain(at) for at in range(3)] == [chains[1], chains[2], chains[0]]
    assert list(trace.lengths) == [2, 2, 2]
    assert list(trace.times) == [1.0, 1.0, 5.0]
    assert trace.sessions[2] == "s"
    assert trace.roles[2] == "user"
    assert (len(trace), trace.references, trace.unique_blocks) == (3, 6, 5)


def test_a_request_without_a_full_block_is_one_of_length_zero() -> None:
    builder = TraceBuilder("t", 4)
    builder.add(0.0, [], tokens=3)
    builder.add(1.0, builder.extend(HEAD, "a"))
    trace = builder.build()
    assert trace.chain(0) == []
    assert list(trace.tokens) == [3, 4]


def test_tokens_that_no_block_could_serve_are_cut_off() -> None:
    builder = TraceBuilder("t", 4)
    chain = builder.extend(HEAD, "ab")
    for tokens in (5, 11, 400, -1):
        builder.add(0.0, chain, tokens=tokens)
    assert list(builder.build().tokens) == [5, 11, 11, 0]


def test_a_trace_of_no_block_is_an_error() -> None:
    builder = TraceBuilder("empty", 4)
    builder.add(0.0, [], tokens=3)
    with pytest.raises(TraceError, match="empty: no request with a full block"):
        builder.build()


def test_keys_are_different_for_every_block_and_survive_a_process_boundary() -> None:
    builder = TraceBuilder("t", 4)
    chain = builder.extend(HEAD, range(300))
    builder.add(0.0, chain)
    trace = builder.build()
    assert len(set(trace.keys())) == 300
    assert pickle.loads(pickle.dumps(trace)).chain(0) == chain


def test_traces_in_turn_share_no_block_and_follow_each_other() -> None:
    parts = []
    for start in (100.0, 3.0):
        builder = TraceBuilder(f"from{start:g}", 4)
        builder.add(start, builder.extend(HEAD, "ab"))
        builder.add(start + 2, builder.extend(HEAD, "ac"))
        builder.add(start + 4, [])
        parts.append(builder.build())
    trace = concatenate(parts)
    assert trace.name == "from100+from3"
    assert list(trace.times) == [0.0, 2.0, 4.0, 5.0, 7.0, 9.0]
    assert trace.unique_blocks == 6
    assert [trace.chain(at) for at in range(6)] == [[0, 1], [0, 2], [], [3, 4], [3, 5], []]


def test_traces_of_different_blocks_cannot_be_played_in_turn() -> None:
    parts = []
    for size in (4, 8):
        builder = TraceBuilder("t", size)
        builder.add(0.0, builder.extend(HEAD, "a"))
        parts.append(builder.build())
    with pytest.raises(TraceError, match="4 and 8 tokens"):
        concatenate(parts)
    with pytest.raises(TraceError, match="no trace"):
        concatenate([])
