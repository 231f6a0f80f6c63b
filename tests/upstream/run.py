# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own offloading tests with EVOKE in the place of what they test.

`python tests/upstream/run.py VLLM WORKDIR`, by `nox -s "upstream(vllm='…')"`. The tests come from
the release's source distribution, fetched from the package index that uv is set up for and checked
against the hash in `releases.toml`; nothing of them is kept in this repository.

They run as they are, then once for each of `MODES`. Whatever passes as it is must pass with ours;
`exceptions.toml` lists what does not, each with its reason, and an exception that is none any more
is an error too.

With `--patched FOLDER`, which holds a patched vLLM, they run as they are and then with that vLLM
instead, and whatever passes must pass there too.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
TESTS = (
    "v1/kv_offload/cpu/test_manager.py",
    "v1/kv_offload/cpu/policies/test_*.py",
    "v1/kv_offload/test_factory.py",
    "v1/kv_offload/tiering/test_factory.py",
    "v1/kv_offload/tiering/test_fs_tier.py",
    "v1/kv_offload/tiering/test_metrics.py",
    "v1/kv_offload/tiering/test_tier_poll_thread.py",
    "v1/kv_offload/tiering/test_tiering_offloading.py",
    "v1/kv_connector/unit/offloading_connector/test_events.py",
    "v1/kv_connector/unit/offloading_connector/test_metrics.py",
    "v1/kv_connector/unit/offloading_connector/test_scheduler.py",
    "v1/kv_connector/unit/offloading_connector/test_worker_metadata.py",
)
WANTED = ("v1/__init__.py", "v1/kv_offload/", "v1/kv_connector/__init__.py",
          "v1/kv_connector/unit/__init__.py", "v1/kv_connector/unit/utils.py",
          "v1/kv_connector/unit/offloading_connector/")  # fmt: skip
MODES = ("manager", "policy")
"""`manager`: our manager and primary tier; `policy`: our policy in the stock manager (0.27+)."""

MODEL = "models--facebook--opt-125m"
"""The tests name this model and read only its configuration; a made-up one serves as well."""


def fetch(release: str, work: Path) -> Path:
    """The release's tests, below a folder that can be put on the path."""
    target = work / "source" / "tests"
    if target.is_dir():
        return target.parent
    pinned = tomllib.loads((HERE / "releases.toml").read_text())[release]["sha256"]
    archive = work / f"vllm-{release}.tar.gz"
    if not archive.exists() or _digest(archive) != pinned:
        _download(release, archive)
    if _digest(archive) != pinned:
        sys.exit(f"the source distribution of vLLM {release} is not the one that was pinned")
    fresh = work / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(archive) as source:
        for member in source:
            _, _, name = member.name.partition("/tests/")
            if member.isfile() and member.name.count("/tests/") and name.startswith(WANTED):
                member.name = f"tests/{name}"
                source.extract(member, fresh, filter="data")
    (fresh / "tests" / "__init__.py").touch()
    fresh.rename(target.parent)
    archive.unlink()
    return target.parent


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(release: str, archive: Path) -> None:
    """Ask uv where the index has the source distribution, and fetch it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    wanted = archive.with_name("wanted.txt")
    wanted.write_text(f"vllm=={release}\n")
    locked = archive.with_name("pylock.toml")
    locked.unlink(missing_ok=True)
    uv = os.environ.get("UV", "uv")
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml",
               "--output-file", str(locked), str(wanted)]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (package,) = tomllib.loads(locked.read_text())["packages"]
    with urllib.request.urlopen(package["sdist"]["url"]) as answer, archive.open("wb") as file:
        shutil.copyfileobj(answer, file)


def model_cache(work: Path) -> Path:
    """A model cache whose one model is a configuration."""
    home = work / "models"
    snapshot = home / "hub" / MODEL / "snapshots" / "0"
    snapshot.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 64,
        "vocab_size": 50272,
        "torch_dtype": "float16",  # else vLLM asks the hub for the weights' type, and waits for it
    }
    (snapshot / "config.json").write_text(json.dumps(config))
    refs = home / "hub" / MODEL / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text("0")
    return home


def run(source: Path, work: Path, mode: str, patched: Path | None = None) -> dict[str, str]:
    """Outcomes by test; `mode` is one of `MODES`, or `stock`; `patched` holds another vLLM."""
    found = sorted(
        str(path.relative_to(source)) for name in TESTS for path in (source / "tests").glob(name)
    )
    result = work / f"{mode}.json"
    result.unlink(missing_ok=True)
    ahead = [patched] if patched else []
    path = [*map(str, (*ahead, source, HERE)), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HOME": str(model_cache(work)),
        "HF_HUB_OFFLINE": "1",
        "EVOKE_POLICY": "lru",
        "EVOKE_UPSTREAM_MODE": mode,
        "EVOKE_UPSTREAM_RESULT": str(result),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "evoke_upstream", "-p",
               "no:cacheprovider", "--tb=line",
               "--rootdir", str(source), "-c", os.devnull, *found]  # fmt: skip
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    (work / f"{mode}.log").write_text(done.stdout + done.stderr)
    if not result.exists():
        sys.exit(f"{mode}: pytest gave no result:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(result.read_text())


def exceptions(release: str, mode: str) -> list[str]:
    """Patterns of the tests that are listed for this release and mode."""
    listed = tomllib.loads((HERE / "exceptions.toml").read_text())["exception"]
    return [
        pattern
        for each in listed
        if each["mode"] == mode and release in each.get("releases", [release])
        for pattern in each["tests"]
    ]


def _named(test: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(test, f"*{pattern}")


def main(release: str, work: Path, patched: Path | None) -> int:
    """Print what ran and what differed; 1 where something differs that is not listed."""
    source = fetch(release, work)
    stock = run(source, work, "stock")
    passing = {test for test, outcome in stock.items() if outcome == "passed"}
    print(f"vLLM {release}: {len(stock)} tests, {len(passing)} pass as they are")
    if not passing:
        return 1
    if patched is not None:
        outcomes = run(source, work, "stock", patched)
        failed = sorted(test for test in passing if outcomes.get(test) != "passed")
        print(f"  patched: {len(passing) - len(failed)} pass")
        for test in failed:
            print(f"    FAILED: {test}")
        return 1 if failed else 0
    wrong = 0
    for mode in MODES if release != "0.24.0" else MODES[:1]:
        outcomes = run(source, work, mode)
        failed = sorted(test for test in passing if outcomes.get(test) != "passed")
        listed = exceptions(release, mode)
        known = [test for test in failed if any(_named(test, pattern) for pattern in listed)]
        unknown = [test for test in failed if test not in known]
        stale = [
            pattern
            for pattern in listed
            if any(_named(test, pattern) for test in passing)
            and not any(_named(test, pattern) for test in failed)
        ]
        print(
            f"  with our {mode}: {len(passing) - len(failed)} pass, {len(known)} listed exceptions"
        )
        for test in unknown:
            print(f"    FAILED, not listed: {test}")
        for pattern in stale:
            print(f"    listed as an exception and is none: {pattern}")
        wrong += len(unknown) + len(stale)
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="vLLM's own offloading tests, with ours")
    parser.add_argument("release")
    parser.add_argument("work", type=Path)
    parser.add_argument("--patched", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    sys.exit(main(given.release, given.work.absolute(), given.patched))
