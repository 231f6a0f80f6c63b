# SPDX-License-Identifier: Apache-2.0
"""What a replay through LMCache leaves, and that the README says what was measured."""

import json
from pathlib import Path

from bench import ROOT
from bench.lmcache.results import document, table, write

PUBLISHED = ROOT / "bench" / "published" / "lmcache" / "agent-text.json"
README = ROOT / "packages" / "evoke-lmcache" / "README.md"


def result(policy: str, chunks: int, hit_tokens: int) -> dict[str, object]:
    return {"policy": policy, "chunks": chunks, "tokens": 4_000, "hit_tokens": hit_tokens}


def test_the_table_follows_from_the_results() -> None:
    results = [result("LRU", 20, 3_000), result("LRU", 5, 1_000), result("EVOKE", 5, 2_002)]
    assert table(results, 100).splitlines() == [
        "| policy | 5 chunks (5%) | 20 chunks (20%) |",
        "| --- | ---: | ---: |",
        "| LRU | 1,000 (25.0%) | 3,000 (75.0%) |",
        "| EVOKE | 2,002 (50.0%) |",
    ]


def test_a_document_says_what_ran_and_not_where(tmp_path: Path) -> None:
    trace = tmp_path / "some.jsonl"
    trace.write_text("{}")
    write(tmp_path / "new" / "it.json", document(trace, {"a": 1}, [result("LRU", 5, 7)]))
    text = (tmp_path / "new" / "it.json").read_text()
    written = json.loads(text)
    assert written["trace"]["name"] == "some.jsonl"
    assert len(written["trace"]["sha256"]) == 64
    assert written["settings"] == {"a": 1}
    assert written["results"] == [result("LRU", 5, 7)]
    assert {"date", "machine", "versions"} <= written.keys()
    assert str(tmp_path) not in text


def test_the_readme_shows_what_is_published() -> None:
    published = json.loads(PUBLISHED.read_text())
    settings, results = published["settings"], published["results"]
    readme = README.read_text()
    assert table(results, settings["distinct_chunks"]) in readme
    said = " ".join(readme.split())
    for figure in (
        f"{settings['requests']} recorded calls",
        f"{results[0]['tokens']:,} tokens of prompts",
        f"{settings['distinct_chunks']} distinct chunks of {settings['chunk_tokens']} tokens",
    ):
        assert figure in said
    best = {result["policy"]: result for result in results}  # the largest pool comes last
    behind = best["LRU"]["hit_tokens"] - best["EVOKE"]["hit_tokens"]
    assert f"here {behind / best['LRU']['tokens'] * 100:.1f} points better" in said


def test_published_runs_are_of_the_newest_lmcache_that_is_tested() -> None:
    versions = json.loads(PUBLISHED.read_text())["versions"]
    locked = (ROOT / "bench/engines/lmcache-0.5.6/versions.txt").read_text()
    assert f"torch=={versions['torch']}" in locked
    assert versions["lmcache"] == "0.5.6"
