"""The client reads answers and cache counts of one request, and notices a crashed engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.serving import client as client_module
from bench.serving.client import CacheCounters, Client
from bench.serving.server import Server
from tests.bench.fake_server import FakeEngine, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine, tmp_path: Path) -> Iterator[Client]:
    log = tmp_path / "log"
    log.touch()
    with serving(engine) as url, Client(Server(url, log, boot_s=0.0)) as client:
        yield client


def test_counts_belong_to_one_request(client: Client) -> None:
    first = client.complete([1, 2, 3], 4)
    assert first.token_ids == (100, 101, 102, 103)
    assert first.cache == CacheCounters(asked=3, queried=3)
    assert client.complete([1, 2, 3], 1).cache == CacheCounters(asked=3, in_gpu=3)
    assert client.complete([4, 5], 1).cache == CacheCounters(asked=2, queried=2)
    assert client.complete([1, 2, 3], 1).cache == CacheCounters(asked=3, queried=3, restored=3)


def test_times_are_ordered(client: Client) -> None:
    answer = client.complete([1], 3)
    assert 0 < answer.ttft_s <= answer.latency_s


def test_request_is_greedy_and_of_fixed_length(client: Client, engine: FakeEngine) -> None:
    client.complete([7], 2)
    client.complete([7], 2, {"evoke": {"source_type": "system"}})
    plain, tagged = engine.bodies
    assert (plain["temperature"], plain["ignore_eos"], plain["max_tokens"]) == (0, True, 2)
    assert "kv_transfer_params" not in plain
    assert tagged["kv_transfer_params"] == {"evoke": {"source_type": "system"}}


def test_a_tiers_counts_by_source_role(client: Client, engine: FakeEngine) -> None:
    assert client.tier_by_role() == {}
    engine.by_role = {"user": (7, 3), "system": (9, 9), "none": (0, 0)}
    assert client.tier_by_role() == {"system": (9, 9), "user": (7, 3)}


def test_item_without_choices_is_a_crash(client: Client) -> None:
    with pytest.raises(BenchError, match=r"broke off .*engine died.*healthy"):
        client.complete([13], 3)


def test_foreign_requests_are_noticed(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_SETTLE_S", 0.0)
    ask = engine.ask
    monkeypatch.setattr(engine, "ask", lambda prompt: (ask(prompt), ask([9])))
    with pytest.raises(BenchError, match="counted 3 prompt tokens for a prompt of 2"):
        client.complete([1, 2], 1)


def test_only_a_line_feed_ends_a_line() -> None:
    """JSON may hold other separators unescaped, and a chunk may end anywhere."""
    text = 'data: {"text": "a\u2028b\x85c"}\r\n\ndata: [DONE]'.encode()
    chunks = [text[:17], text[17:18], text[18:]]
    assert list(client_module._lines(chunks)) == [
        'data: {"text": "a\u2028b\x85c"}',
        "",
        "data: [DONE]",
    ]
