"""Profiles: what a gate runs on one class of machine, read from gates/profiles/*.toml.

A profile names the model, the number format, the pool, the tier and the workload, and says why.
A wrong one is refused with one line that names the file, the key and what is allowed.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from bench.errors import UsageProblem
from gates.recording import Rules
from gates.workload import Shape

FOLDER = Path(__file__).resolve().parent / "profiles"
TINY, SMOLLM2 = "tiny-random", "smollm2-135m"
DEVICES = ("cpu", "cuda")
ARM_NAMES = ("baseline", "evoke", "control", "evoke-scored", "lru")
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Model:
    """`source`: tiny-random, smollm2-135m, or a name that the engine itself resolves.

    `layers`, `kv_heads` and `head_size` size the KV cache where the model's folder is not at hand.
    `weights_gib` is what the weights take in the device's memory, as it is loaded.
    """

    source: str
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    kv_dtype: str | None = None
    weights_gib: float = 0.0

    @property
    def value_bytes(self) -> int:
        """Bytes of one number in the KV cache."""
        return VALUE_BYTES[self.kv_dtype or self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.value_bytes


@dataclass(frozen=True)
class Pools:
    """The engine's small pool in blocks, and the tier as a share of all distinct blocks."""

    device: str
    block_size: int
    pool_blocks: int
    tier_share: float
    max_model_len: int
    max_batched_tokens: int = 256
    max_seqs: int = 8
    memory_gib: float = 0.0
    usable_share: float = 0.9
    headroom_gib: float = 1.0
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """One class of machine; `arms` beside baseline, evoke and control, which always run."""

    name: str
    title: str
    why: str
    model: Model
    pools: Pools
    workload: Shape
    rules: Rules
    arms: tuple[str, ...] = ()


def profile_names() -> list[str]:
    """Return the names of the profiles there are."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """Return the profile of this name, or of the TOML file at this path."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        close = get_close_matches(name, profile_names(), 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(profile_names())}"
        raise UsageProblem(f"no profile {name!r}; {hint}")
    try:
        content = tomllib.loads(path.read_text())
        profile: Profile = _build(Profile, {"name": path.stem, **content}, "")
        _check(profile)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise UsageProblem(f"profile {path.name}: {error}") from None
    return profile


def _build(kind: type, content: Any, at: str) -> Any:
    """Build a dataclass from a TOML table, every key and type checked."""
    if not isinstance(content, dict):
        raise ValueError(f"{at or 'the file'} must be a table")
    hints = get_type_hints(kind)
    known = {each.name for each in fields(kind)}
    for key in content:
        if key not in known:
            close = get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"unknown key {at}{key}; {hint}")
    values = {}
    for each in fields(kind):
        path = f"{at}{each.name}"
        if each.name not in content:
            if each.default is MISSING:
                raise ValueError(f"{path} is missing")
            continue
        values[each.name] = _value(hints[each.name], content[each.name], path)
    return kind(**values)


def _value(kind: Any, value: Any, path: str) -> Any:
    if get_origin(kind) in (Union, UnionType):  # only "... | None", and TOML has no null
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{path} must be a list of texts, not {value!r}")
        return tuple(value)
    if hasattr(kind, "__dataclass_fields__"):
        return _build(kind, value, f"{path}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path} must be of type {kind.__name__}, not {value!r}")
    return value


def _check(profile: Profile) -> None:
    model, pools, shape, rules = profile.model, profile.pools, profile.workload, profile.rules
    positive: Mapping[str, float] = {
        "model.layers": model.layers,
        "model.kv_heads": model.kv_heads,
        "model.head_size": model.head_size,
        "pools.block_size": pools.block_size,
        "pools.pool_blocks": pools.pool_blocks,
        "pools.tier_share": pools.tier_share,
        "pools.max_model_len": pools.max_model_len,
        "workload.sessions": shape.sessions,
        "workload.turns": shape.turns,
        "workload.turn_tokens": shape.turn_tokens,
        "workload.answer_tokens": shape.answer_tokens,
        "workload.passkey_tokens": shape.passkey_tokens,
    }
    for key, value in positive.items():
        if not value > 0:
            raise ValueError(f"{key} must be above 0, not {value}")
    for key, dtype in (("dtype", model.dtype), ("kv_dtype", model.kv_dtype)):
        if dtype is not None and dtype not in VALUE_BYTES:
            allowed = ", ".join(VALUE_BYTES)
            raise ValueError(f"model.{key} must be one of {allowed}, not {dtype!r}")
    if pools.device not in DEVICES:
        raise ValueError(f"pools.device must be one of {', '.join(DEVICES)}, not {pools.device!r}")
    if pools.device == "cuda" and not (pools.memory_gib > 0 and model.weights_gib > 0):
        raise ValueError("pools.memory_gib and model.weights_gib are needed on a GPU")
    for name in profile.arms:
        if name not in ARM_NAMES:
            raise ValueError(f"no arm {name!r}; there are {', '.join(ARM_NAMES)}")
    if not rules.logprob_tolerance >= 0:
        tolerance = rules.logprob_tolerance
        raise ValueError(f"rules.logprob_tolerance must be at least 0, not {tolerance}")
    if not rules.min_restored_tokens > 0 or not rules.min_restored_probes > 0:
        raise ValueError("rules: floors of restored tokens and probes must be above 0")
