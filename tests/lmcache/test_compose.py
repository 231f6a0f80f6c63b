# SPDX-License-Identifier: Apache-2.0
"""What `evoke-lmcache compose` prints, warns of and refuses. Needs neither LMCache nor vLLM."""

import json
import shlex

import pytest

from evoke_core import RequestTags
from evoke_lmcache.compose import GIB, main

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    versions = []
    for name, version in (("--lmcache-version", "0.5.6"), ("--vllm-version", "0.24.0")):
        if name not in arguments:
            versions += [name, version]
    code = main(["compose", *arguments, *versions])
    out, err = capsys.readouterr()
    return code, out, err


def config(out: str) -> dict[str, object]:
    [line] = [line for line in out.splitlines() if line.startswith("--kv-transfer-config")]
    _, text = shlex.split(line)
    found: dict[str, object] = json.loads(text)
    return found


def test_two_connectors_share_the_memory(capsys: Captured) -> None:
    code, out, err = run(capsys, "both", "--gib", "8", "--world-size", "2", "--set", "policy=lru")
    assert code == 0
    made = config(out)
    assert made["kv_connector"] == "MultiConnector"
    vllm, lmcache = made["kv_connector_extra_config"]["connectors"]  # type: ignore[index]
    assert (vllm["kv_connector"], lmcache["kv_connector"]) == (
        "OffloadingConnector", "LMCacheConnectorV1"
    )  # fmt: skip
    ours, theirs = (part["kv_connector_extra_config"] for part in (vllm, lmcache))
    assert ours["cpu_bytes_to_use"] == 4 * GIB
    assert theirs["lmcache.max_local_cpu_size"] * 2 * GIB == 4 * GIB  # LMCache counts per worker
    assert theirs["lmcache.cache_policy"] == "EVOKE"
    assert ours["evoke"] == theirs["lmcache.extra_config"]["evoke"] == {"policy": "lru"}
    assert "engine_id" not in vllm
    assert "engine_id" not in lmcache
    assert "store every block" in err
    assert "the first connector with any hit" in err


def test_one_connector_gets_all_of_it(capsys: Captured) -> None:
    _, out, err = run(capsys, "vllm", "--gib", "8", "--block-size", "64")
    extra = config(out)["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 8 * GIB  # type: ignore[index]
    assert extra["block_size"] == 64  # type: ignore[index]
    _, out, err = run(capsys, "lmcache", "--gib", "8", "--json")
    assert json.loads(out)["kv_connector_extra_config"]["lmcache.max_local_cpu_size"] == 8
    assert not err


def test_a_server_and_its_connector(capsys: Captured) -> None:
    code, out, _ = run(capsys, "server", "--gib", "8", "--set", "policy=scored")
    assert code == 0
    command = shlex.split(out.splitlines()[0])
    assert command[:2] == ["lmcache", "server"]
    assert command[command.index("--eviction-policy") + 1] == "noop"
    assert command[command.index("--l1-size-gb") + 1] == "8"
    module = json.loads(command[command.index("--server-module") + 1])
    assert module["config"] == {"evoke": {"policy": "scored"}}
    assert config(out)["kv_connector"] == "LMCacheMPConnector"


def test_tags_are_written_so_that_both_read_them(capsys: Captured) -> None:
    _, out, _ = run(
        capsys, "both", "--gib", "2", "--tag", "source_type=system", "--tag", "priority=2"
    )
    params = json.loads("{" + out.splitlines()[-1] + "}")["kv_transfer_params"]
    assert all(isinstance(value, str) for value in params.values())
    tags, problems = RequestTags.from_transfer_params(params)
    assert not problems
    assert (tags.source_type, tags.priority) == ("system", 2.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["both-server", "--vllm-version", "0.24.0"], "can store wrong KV"),
        (["both-server", "--vllm-version", "0.25.3"], "vLLM #46865"),
        (["both", "--child", "engine_id=x"], "TypeError"),
        (["lmcache", "--chunk-size", "100"], "multiples of the engine's block, 16 tokens"),
        (["vllm", "--block-size", "24"], "multiples of the engine's block"),
        (["vllm", "--gib", "0"], "more than 0 GiB"),
        (["server", "--lmcache-version", "0.5.3"], "takes modules from 0.5.5 on"),
        (["server", "--server-url", "here"], "HOST:PORT"),
        (["lmcache", "--set", "w_recencey=1"], "did you mean w_recency"),
        (
            ["lmcache", "--set", "w_attention=0.1", "--set", "w_reuse=0.1"],
            "nothing about attention",
        ),
        (["both", "--set", "record_trace=/tmp/x"], "only evoke-vllm makes recordings"),
        (["lmcache", "--tag", "priority=high"], "--tag priority: not a number"),
        (["lmcache", "--tag", "colour=red"], "unknown"),
        (["both", "--vllm-version", "next"], "is not a version"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_refused_with_the_reason(capsys: Captured, arguments: list[str], reason: str) -> None:
    given = arguments if "--gib" in arguments else [*arguments, "--gib", "8"]
    code, out, err = run(capsys, *given)
    assert code == 2
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("refused: ")
    assert reason in line


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["both", "--first", "lmcache"], "serves whatever it has any of"),
        (["both", "--hybrid"], "turns vLLM's hybrid KV-cache manager off"),
        (["both", "--block-size", "48", "--chunk-size", "64"], "do not nest"),
        (["both"], "cross-layer block layout"),
        (["vllm", "--vllm-version", "0.30.0"], "built for vLLM 0.24.0"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_warned_of_and_printed(capsys: Captured, arguments: list[str], warning: str) -> None:
    code, out, err = run(capsys, *arguments, "--gib", "8")
    assert code == 0
    assert config(out)
    assert warning in err


def test_the_safe_version_is_let_through(capsys: Captured) -> None:
    code, out, _ = run(
        capsys,
        "both-server",
        "--gib",
        "8",
        "--vllm-version",
        "0.26.0",
        "--lmcache-version",
        "0.5.6",
    )
    assert code == 0
    connectors = config(out)["kv_connector_extra_config"]["connectors"]  # type: ignore[index]
    assert [part["kv_connector"] for part in connectors] == [
        "OffloadingConnector", "LMCacheMPConnector"
    ]  # fmt: skip
