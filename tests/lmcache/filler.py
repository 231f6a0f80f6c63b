# SPDX-License-Identifier: Apache-2.0
"""A module inside `lmcache server` that plays an engine: it looks up, reads and stores.

It drives the server's own lookup module and storage manager, as the transfer modules do for an
engine with a GPU, and writes what it saw to a file: hits, writes that found no room, wrong bytes.

`{"module_path": "tests.lmcache.filler", "config": {"report": PATH, ...}}`
"""

import json
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ipc_key_to_object_keys
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

MODEL = "model"
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([16384])], dtypes=[torch.uint8])


class Filler:
    """One request after another, as the configuration says."""

    def __init__(self, build: Any) -> None:
        self.ctx = build.server_context
        self.config = build.config
        [self.lookups] = [m for m in build.modules if type(m).__name__ == "LookupModule"]
        self.ctx.layout_desc_registry.register(MODEL, 1, LAYOUT)
        self.report: dict[str, Any] = {
            "failed": 0,
            "wrong": 0,
            "written": 0,
            "found": 0,
            "hits": {},
        }
        self._requests = 0
        threading.Thread(target=self.run, daemon=True).start()

    @property
    def context(self) -> Any:
        return self.ctx

    def report_status(self) -> dict[str, Any]:
        return {"filler": self.report}

    def close(self) -> None:
        """It ends by itself."""

    def run(self) -> None:
        try:
            time.sleep(self.config.get("wait_s", 0.5))
            self.work()
        except Exception:
            self.report["error"] = traceback.format_exc()
        path = Path(self.config["report"])
        path.with_suffix(".part").write_text(json.dumps(self.report))
        path.with_suffix(".part").rename(path)

    def work(self) -> None:
        system = tokens("system", self.config["system_chunks"])
        tags = self.config.get("tags")
        pause = self.config.get("pause_s", 0.004)
        self.serve("first", system + tokens("user", 1), tags)
        for n in range(self.config["churn"]):
            self.serve(None, tokens(f"churn {n}", self.config["churn_chunks"]), None)
            time.sleep(pause)
        time.sleep(0.3)  # the events have arrived
        self.report["hits"]["last"] = self.serve("last", system + tokens("user", 1), tags)
        usage = self.ctx.storage_manager.get_l1_usage()
        self.report["usage"] = list(usage)
        if self.config.get("settle_s"):
            time.sleep(self.config["settle_s"])

    def serve(self, name: str | None, prompt: list[int], tags: dict[str, str] | None) -> int:
        self._requests += 1
        request = name or f"request {self._requests}"
        size = self.ctx.chunk_size
        whole = IPCCacheServerKey.from_token_ids(
            MODEL, 1, None, prompt, 0, len(prompt), request, request_configs=tags
        )
        self.lookups.lookup(whole, 1)
        found = self.lookups.wait_prefetch_status(request, 10.0) or 0
        hashes = [
            TokenHasher.hash_to_bytes(h) if not isinstance(h, bytes) else h
            for h in self.ctx.token_hasher.compute_chunk_hashes(prompt, end=len(prompt))
        ]
        own = IPCCacheServerKey.from_token_ids(MODEL, 1, 0, prompt, 0, len(prompt), request)
        [keys] = ipc_key_to_object_keys(own, hashes, [0])
        storage = self.ctx.storage_manager
        self.report["found"] += found
        if found:
            _, things = storage.unsafe_read(keys[:found])
            for key, thing in zip(keys, things, strict=False):
                self.report["wrong"] += not torch.equal(
                    thing.tensor.flatten()[:64].cpu(), pattern(key.chunk_hash)
                )
            held = IPCCacheServerKey.from_token_ids(
                MODEL, 1, None, prompt, 0, found * size, request
            )
            self.lookups.free_lookup_locks(held, 1)
        wanted = keys[found:]
        reserved = storage.reserve_write(wanted, LAYOUT)
        for key, thing in reserved.items():
            thing.tensor.flatten()[:64].copy_(pattern(key.chunk_hash))
        storage.finish_write(list(reserved))
        self.report["failed"] += len(wanted) - len(reserved)
        self.report["written"] += len(reserved)
        self.lookups.end_session(request)
        return int(found)


def tokens(name: str, chunks: int, size: int = 16) -> list[int]:
    base = int.from_bytes(name.encode()[-6:], "big") % 1_000_003 * 4096
    return [base + n for n in range(chunks * size)]


def pattern(digest: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray((digest * 64)[:64]), dtype=torch.uint8)


def build_server_modules(build: Any) -> Filler:
    return Filler(build)
