# SPDX-License-Identifier: Apache-2.0
"""An LMCache instance in a process of its own, told what to do line by line.

`python -m tests.lmcache.instance CHUNKS REMOTE_URL`; each line on standard input is a JSON list:
an operation (`serve`, `hits` or `state`) and the parts of a prompt, `[name, chunks]` each. Answers
are JSON lines that begin with `ANSWER `.

It ends without closing: LMCache 0.5.6 waits for itself when it closes a Redis connector.
"""

import json
import os
import sys

from tests.lmcache.engine import engine, prompt

SYSTEM = {"lmcache.evoke.source_type": "system", "lmcache.evoke.priority": "4"}


def main(chunks: int, url: str) -> None:
    with engine("EVOKE", chunks, remote_url=url, remote_serde="naive") as cache:
        for line in sys.stdin:
            operation, parts, tagged = json.loads(line)
            tokens = [token for name, n in parts for token in prompt(name, n)]
            answer: object
            if operation == "serve":
                answer = cache.serve(tokens, SYSTEM if tagged else None)
            elif operation == "hits":
                answer = cache.hits(tokens)
            else:
                keys = [key for *_, key in cache.built.token_database.process_tokens(tokens=tokens)]
                policy = cache.cpu.cache_policy
                answer = {
                    "held": len(cache.cpu.hot_cache),
                    "of_prompt": sum(dict.__contains__(cache.cpu.hot_cache, key) for key in keys),
                    "evicted": policy.retention.counters.evicted,
                    "failed": policy.guarded.failed,
                }
            print(f"ANSWER {json.dumps(answer)}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
