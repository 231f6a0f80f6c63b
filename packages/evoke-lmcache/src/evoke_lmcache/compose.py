"""``evoke-lmcache compose``: a checked ``--kv-transfer-config`` for vLLM, with EVOKE in it.

    evoke-lmcache compose both --gib 32 --chunk-size 256
    evoke-lmcache compose lmcache --gib 32 --set policy=scored
    evoke-lmcache compose server --gib 32

What is printed is valid, or nothing is: sizes that do not align, unknown settings and combinations
that can store wrong KV are refused with one line that says why (exit code 2). What works but may
surprise is printed with a warning on standard error.

``--gib`` is the memory of all tiers together, so that one connector and two are compared at equal
cost: under ``both`` each gets half.
"""

import argparse
import importlib.metadata
import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from attrs import define, field

from evoke_core import ConfigError, EvokeConfig, RequestTags
from evoke_lmcache.settings import load_config

GIB = 1024**3
DEFAULT_VLLM = "0.24.0"
DEFAULT_LMCACHE = "0.5.6"
MP_SAFE = (0, 26)  # from here on MultiConnector gives losing children the blocks that were loaded
SERVER_MODULES = (0, 5, 5)


class Refused(Exception):
    """A combination that must not run. The message says why, in one line."""


@define(kw_only=True)
class Plan:
    """What to compose.

    Attributes:
        what: ``both``, ``vllm`` (evoke-vllm alone), ``lmcache`` (in the engine), ``server``, or
            ``both-server``.
        gib: memory of all tiers on this machine together.
        world_size: workers of the engine; LMCache counts its memory per worker.
        engine_block: tokens of an engine block.
        block_size: tokens of a block of evoke-vllm's tier; the engine's if None.
        chunk_size: tokens of an LMCache chunk.
        first: which connector is asked first under ``both``.
        settings: EVOKE's settings, for both.
        tags: of a request, to be checked and written out.
        children: further fields for the child connectors, refused where they cannot work.
    """

    what: str
    gib: float
    world_size: int = 1
    engine_block: int = 16
    block_size: int | None = None
    chunk_size: int = 256
    first: str = "vllm"
    hybrid: bool = False
    vllm: str = DEFAULT_VLLM
    lmcache: str = DEFAULT_LMCACHE
    server_url: str = "localhost:5555"
    settings: dict[str, Any] = field(factory=dict)
    children: dict[str, Any] = field(factory=dict)
    tags: dict[str, Any] = field(factory=dict)


@define
class Composition:
    """What came out: the configuration, the server's command and a request's parameters if asked
    for, and warnings."""

    config: dict[str, Any]
    server: list[str]
    params: dict[str, str]
    warnings: list[str]


def compose(plan: Plan) -> Composition:
    """Return the configuration for a plan.

    Raises:
        Refused: sizes that do not align, or a combination that can store wrong KV.
        ConfigError: a setting of EVOKE that cannot be honoured.
    """
    if plan.what == "vllm":
        EvokeConfig.load(plan.settings, source="--set", environ={})
    else:
        load_config({"evoke": plan.settings}, source="--set", environ={})
    params = request_params(plan.tags)
    _check_sizes(plan)
    warnings: list[str] = []
    both = plan.what in ("both", "both-server")
    vllm, lmcache = version(plan.vllm), version(plan.lmcache)
    if plan.what in ("both", "vllm", "both-server") and vllm[:2] != (0, 24):
        warnings.append(f"evoke-vllm is built for vLLM 0.24.0, not {plan.vllm}")
    if plan.what in ("server", "both-server") and lmcache < SERVER_MODULES:
        raise Refused(
            f"LMCache {plan.lmcache}: its server takes modules from 0.5.5 on; use `lmcache` instead"
        )
    if plan.what == "both-server" and vllm < MP_SAFE:
        raise Refused(
            f"LMCacheMPConnector under MultiConnector on vLLM {plan.vllm} can store wrong KV: a "
            "connector that loses a request is told that no blocks were allocated and saves from "
            "the wrong ones (vLLM #46865); use vLLM 0.26 or newer, `both` (LMCache inside the "
            "engine), or `server` alone"
        )
    if "engine_id" in plan.children:
        raise Refused(
            "engine_id under a child connector: MultiConnector passes it a second time and vLLM "
            "stops with a TypeError; set it on the whole configuration"
        )
    share = plan.gib / 2 if both else plan.gib
    parts: dict[str, dict[str, Any]] = {}
    server: list[str] = []
    if plan.what in ("both", "vllm", "both-server"):
        parts["vllm"] = _offloading(plan, share)
    if plan.what in ("both", "lmcache"):
        parts["lmcache"] = _in_process(plan, share)
    if plan.what in ("server", "both-server"):
        parts["lmcache"] = _connector_to_server(plan)
        server = _server(plan, share)
    for part in parts.values():
        part.update(plan.children)
    if both:
        warnings += _warn_of_two(plan)
    if plan.what in ("both", "lmcache") and plan.hybrid:
        warnings.append(
            "LMCacheConnectorV1 turns vLLM's hybrid KV-cache manager off for the whole engine: a "
            "hybrid model keeps full-length KV for its windowed layers too"
        )
    if not both:
        return Composition(next(iter(parts.values())), server, params, warnings)
    order = ["vllm", "lmcache"] if plan.first == "vllm" else ["lmcache", "vllm"]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [parts[name] for name in order]},
    }
    return Composition(config, server, params, warnings)


def request_params(tags: dict[str, Any]) -> dict[str, str]:
    """Return tags as a request's ``kv_transfer_params``, in the form that both connectors read.

    Raises:
        Refused: a tag that would be ignored.
    """
    params = {
        f"lmcache.evoke.{tag}": value if isinstance(value, str) else json.dumps(value)
        for tag, value in tags.items()
    }
    _, problems = RequestTags.from_transfer_params(params)
    if problems:
        raise Refused("; ".join(f"--tag {problem.tag}: {problem.reason}" for problem in problems))
    return params


def _check_sizes(plan: Plan) -> None:
    if not 0 < plan.gib < 1e6:
        raise Refused(f"--gib {plan.gib:g}: allowed are more than 0 GiB")
    for name, count in (("--world-size", plan.world_size), ("--engine-block", plan.engine_block)):
        if count < 1:
            raise Refused(f"{name} {count}: allowed are integers of at least 1")
    for name, value in (("--block-size", plan.block_size), ("--chunk-size", plan.chunk_size)):
        if value is not None and (value < 1 or value % plan.engine_block):
            raise Refused(
                f"{name} {value}: allowed are multiples of the engine's block, "
                f"{plan.engine_block} tokens"
            )


def _offloading(plan: Plan, gib: float) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "spec_name": "EvokeOffloadingSpec",
        "spec_module_path": "evoke_vllm.spec",
        "cpu_bytes_to_use": int(gib * GIB),
    }
    if plan.block_size is not None:
        extra["block_size"] = plan.block_size
    if plan.settings:
        extra["evoke"] = plan.settings
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _in_process(plan: Plan, gib: float) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "lmcache.cache_policy": "EVOKE",
        "lmcache.chunk_size": plan.chunk_size,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": gib / plan.world_size,
    }
    if plan.settings:
        extra["lmcache.extra_config"] = {"evoke": plan.settings}
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _connector_to_server(plan: Plan) -> dict[str, Any]:
    host, _, port = plan.server_url.rpartition(":")
    if not host or not port.isdigit():
        raise Refused(f"--server-url {plan.server_url!r}: allowed is HOST:PORT")
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{host}",
            "lmcache.mp.port": int(port),
        },
    }


def _server(plan: Plan, gib: float) -> list[str]:
    module: dict[str, Any] = {"module_path": "evoke_lmcache.server_module"}
    if plan.settings:
        module["config"] = {"evoke": plan.settings}
    host, _, port = plan.server_url.rpartition(":")
    return [
        *("lmcache", "server", "--host", host, "--port", port),
        *("--chunk-size", str(plan.chunk_size), "--l1-size-gb", f"{gib:g}"),
        *("--eviction-policy", "noop", "--server-module", json.dumps(module)),
    ]


def _warn_of_two(plan: Plan) -> list[str]:
    warnings = [
        "both connectors store every block: the two tiers of "
        f"{plan.gib / 2:g} GiB hold about what one of {plan.gib / 2:g} GiB would"
    ]
    block = plan.block_size or plan.engine_block
    if plan.first == "vllm":
        warnings.append(
            "the first connector with any hit serves the request, not the one with the longest: "
            "LMCache is asked only where evoke-vllm has nothing"
        )
    else:
        warnings.append(
            "LMCache is asked first and serves whatever it has any of, in chunks of "
            f"{plan.chunk_size} tokens, even where evoke-vllm has more; `--first vllm` is the "
            "tested order"
        )
    if plan.chunk_size % block and block % plan.chunk_size:
        warnings.append(
            f"blocks of {block} and chunks of {plan.chunk_size} tokens do not nest: the two tiers "
            "round hits to different lengths"
        )
    warnings.append("beside LMCache the offloading connector loses its cross-layer block layout")
    return warnings


def version(text: str) -> tuple[int, ...]:
    """Return the numbers at the front of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise Refused(f"{text!r} is not a version")
    return tuple(map(int, found[0].split(".")))


def installed(name: str, default: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return default


# --- the command ---


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evoke-lmcache")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "compose", help="print a checked --kv-transfer-config", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("what", choices=["both", "vllm", "lmcache", "server", "both-server"])
    command.add_argument("--gib", type=float, required=True, help="memory of all tiers together")
    command.add_argument("--world-size", type=int, default=1, help="workers of the engine")
    command.add_argument("--engine-block", type=int, default=16, help="tokens of an engine block")
    command.add_argument("--block-size", type=int, help="tokens of a block of evoke-vllm's tier")
    command.add_argument("--chunk-size", type=int, default=256, help="tokens of an LMCache chunk")
    command.add_argument("--first", choices=["vllm", "lmcache"], default="vllm")
    command.add_argument("--hybrid", action="store_true", help="the model has several KV groups")
    command.add_argument("--vllm-version", dest="vllm", default=installed("vllm", DEFAULT_VLLM))
    command.add_argument(
        "--lmcache-version", dest="lmcache", default=installed("lmcache", DEFAULT_LMCACHE)
    )
    command.add_argument("--server-url", default="localhost:5555", metavar="HOST:PORT")
    command.add_argument(
        "--set", dest="settings", type=_setting, action="append", default=[], metavar="KEY=VALUE",
        help="a setting of EVOKE, such as policy=scored",
    )  # fmt: skip
    command.add_argument(
        "--child", dest="children", type=_setting, action="append", default=[],
        metavar="KEY=VALUE", help="a further field of every child connector",
    )  # fmt: skip
    command.add_argument(
        "--tag", dest="tags", type=_setting, action="append", default=[], metavar="KEY=VALUE",
        help="a tag of a request, such as source_type=system, to be checked and written out",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print the configuration only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 where something was refused."""
    options = vars(_parser().parse_args(arguments))
    options.pop("command")
    bare = options.pop("json")
    options["settings"] = dict(options["settings"])
    options["children"] = dict(options["children"])
    options["tags"] = dict(options["tags"])
    try:
        done = compose(Plan(**options))
        _ask_vllm(done.config)
    except (Refused, ConfigError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    text = json.dumps(done.config)
    if bare:
        print(text)
        return 0
    if done.server:
        print(shlex.join(done.server))
    print(f"--kv-transfer-config {shlex.quote(text)}")
    if done.params:
        print(f'"kv_transfer_params": {json.dumps(done.params)}')
    return 0


def _ask_vllm(config: dict[str, Any]) -> None:
    """Where vLLM is installed, let it read what is about to be printed."""
    try:
        from vllm.config import KVTransferConfig
    except ImportError:
        return
    engine_id = "compose"
    parts = config["kv_connector_extra_config"].get("connectors", [])
    try:
        KVTransferConfig(**config, engine_id=engine_id)
        for part in parts:
            KVTransferConfig(**part, engine_id=engine_id)
    except (TypeError, ValueError) as error:
        raise Refused(f"vLLM does not accept the configuration: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
