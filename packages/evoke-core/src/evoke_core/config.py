"""The operator's settings: parsed once at start-up, frozen afterwards.

A wrong value stops start-up with one line that names the key, the value, where it came from and
what is allowed. The environment wins over the mapping, so that a deployment can be tuned without
touching its launch command.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import field, fields, frozen

from evoke_core.policies import POLICIES

DEFAULT_FLOORS: Mapping[str, float] = {"system": 0.6, "user": 0.6, "assistant": 0.5}
AUTO = "auto"
ADAPTIVE = "adaptive"
SCORED = "scored"

_FLOOR_PREFIX = "EVOKE_FLOOR_"
_TEXTS = ("policy", "record_trace")
_WEIGHTS = ("w_recency", "w_reuse", "w_attention", "w_coherence")
# Sums of decimal weights such as 0.1 + 0.2 + 0.7 may exceed 1 by a rounding error.
_SUM_TOLERANCE = 1e-9


class ConfigError(ValueError):
    """A setting that cannot be honoured. The message is one line, meant for an operator."""


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _is_weight(value: Any) -> bool:
    return _is_number(value, 0.0, 1.0)


def _is_half_life(value: Any) -> bool:
    return value == AUTO or (_is_number(value, 0.0, sys.float_info.max) and value > 0)


def _is_floors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(role, str) and role and _is_weight(floor) for role, floor in value.items()
    )


_WEIGHT = (_is_weight, "a number from 0 to 1, all weights together at most 1")
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_WEIGHTS, _WEIGHT),
    "recency_half_life": (_is_half_life, 'a positive number of requests, or "auto"'),
    "source_floors": (_is_floors, "a mapping of source role to a number from 0 to 1"),
    "policy": (
        lambda value: isinstance(value, str) and value in POLICIES,
        "one of " + ", ".join(sorted(POLICIES)),
    ),
    "ghost_factor": (lambda value: _is_number(value, 0.0, 64.0), "a number from 0 to 64"),
    "max_pinned_fraction": (_is_weight, "a number from 0 to 1"),
    "max_session_fraction": (
        lambda value: _is_weight(value) and value > 0.0,
        "a number above 0 and at most 1 (1: no limit)",
    ),
    "record_trace": (
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "the path of a file to write",
    ),
    "record_trace_mib": (
        lambda value: _is_number(value, 1.0, 1_048_576.0),
        "a number of MiB from 1 to 1048576",
    ),
}


def _check(name: str) -> Callable[[Any, Any, Any], None]:
    """Return the attrs validator of one setting; its error says what is allowed."""
    accept, allowed = _ALLOWED[name]

    def check(instance: Any, attribute: Any, value: Any) -> None:
        if not accept(value):
            raise ConfigError(f"{name} = {value!r} is not allowed; allowed: {allowed}")

    return check


@frozen(kw_only=True)
class EvokeConfig:
    """Settings of the retention policy. All have defaults that need no tuning.

    Attributes:
        w_recency, w_reuse, w_attention, w_coherence: weights of the score's terms, each from 0 to
            1, their sum at most 1. Attention and coherence count only where a runtime supplies
            those signals.
        recency_half_life: age, in requests, at which recency has halved; ``"auto"`` takes the
            number of requests in which the pool turns over once, within [16, 65,536].
        source_floors: lower bound of the score by source role, from 0 to 1; other roles get 0.
        policy: name of the ranking, see :data:`evoke_core.policies.POLICIES`; by default
            ``"adaptive"``, which knows no weights, or ``"scored"`` where weights or a half-life
            are set.
        ghost_factor: evicted blocks whose reuse count is remembered, per resident block.
        max_pinned_fraction: share of the pool that requests may pin, from 0 to 1.
        max_session_fraction: share of the pool that one session may fill with blocks of its own
            while room is short, above 0 to 1; 1 sets no limit.
        record_trace: where an adapter that can record writes what its tier did; None: nowhere.
        record_trace_mib: size of that recording, in MiB, beyond which its oldest part goes.

    Raises:
        ConfigError: on construction, with one line that names the setting and what is allowed.
    """

    w_recency: float = field(default=0.5, validator=_check("w_recency"))
    w_reuse: float = field(default=0.5, validator=_check("w_reuse"))
    w_attention: float = field(default=0.0, validator=_check("w_attention"))
    w_coherence: float = field(default=0.0, validator=_check("w_coherence"))
    recency_half_life: float | str = field(default=AUTO, validator=_check("recency_half_life"))
    source_floors: Mapping[str, float] = field(
        factory=lambda: dict(DEFAULT_FLOORS), validator=_check("source_floors")
    )
    policy: str = field(validator=_check("policy"))
    ghost_factor: float = field(default=4.0, validator=_check("ghost_factor"))
    max_pinned_fraction: float = field(default=0.25, validator=_check("max_pinned_fraction"))
    max_session_fraction: float = field(default=1.0, validator=_check("max_session_fraction"))
    record_trace: str | None = field(default=None, validator=_check("record_trace"))
    record_trace_mib: float = field(default=256.0, validator=_check("record_trace_mib"))

    @policy.default
    def _default_policy(self) -> str:
        given = (self.w_recency, self.w_reuse, self.w_attention, self.w_coherence)
        untouched = given == (0.5, 0.5, 0.0, 0.0) and self.recency_half_life == AUTO
        return ADAPTIVE if untouched else SCORED

    def __attrs_post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in _WEIGHTS}
        if sum(weights.values()) > 1.0 + _SUM_TOLERANCE:
            shown = ", ".join(f"{name} = {value:g}" for name, value in weights.items() if value)
            raise ConfigError(
                f"{shown} sum to {sum(weights.values()):g}; allowed: a sum of at most 1"
            )

    @classmethod
    def load(
        cls,
        mapping: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        source: str = "evoke",
        say: Callable[[str], None] = lambda line: None,
        default_policy: str = ADAPTIVE,
    ) -> "EvokeConfig":
        """Build the settings from a mapping (named ``source`` in errors) and the environment.

        Variables are ``EVOKE_`` and the setting's name in capitals, and ``EVOKE_FLOOR_<ROLE>``
        for one role's floor. ``environ`` defaults to the process's environment. Weights or a
        half-life without a policy select ``"scored"``, and ``say`` is told so; without any of
        them the policy is ``default_policy``.

        Raises:
            ConfigError: a wrong value, an unknown key, or an ``EVOKE_`` variable that looks like
                a misspelt one. Other ``EVOKE_`` variables belong to somebody else.
        """
        given, origin = _from_mapping(mapping, source)
        _apply_environment(os.environ if environ is None else environ, given, origin)
        for name, value in given.items():
            try:
                _check(name)(None, None, value)
            except ConfigError as error:
                raise ConfigError(f"{error} (from {origin[name]})") from None
        formula = [name for name in (*_WEIGHTS, "recency_half_life") if name in given]
        if formula and "policy" not in given:
            given["policy"] = SCORED
            say(f"{', '.join(formula)} without a policy: policy is {SCORED}")
        given.setdefault("policy", default_policy)
        try:
            return cls(**given)
        except ConfigError as error:
            places = sorted({origin[name] for name in _WEIGHTS if name in origin})
            raise ConfigError(f"{error} (from {', '.join(places)})") from None


SETTINGS = tuple(attribute.name for attribute in fields(EvokeConfig))


def _from_mapping(
    mapping: Mapping[str, Any] | None, source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    if mapping is None:
        return {}, {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source} = {mapping!r} is not allowed; allowed: a mapping of settings")
    for key in mapping:
        if key not in SETTINGS:
            raise ConfigError(_unknown(str(key), SETTINGS, source))
    return dict(mapping), dict.fromkeys(mapping, source)


def _apply_environment(
    environ: Mapping[str, str], given: dict[str, Any], origin: dict[str, str]
) -> None:
    variables = {f"EVOKE_{name.upper()}": name for name in SETTINGS if name != "source_floors"}
    floors: dict[str, Any] = {}
    for variable in sorted(environ):
        if not variable.startswith("EVOKE_"):
            continue
        text = environ[variable]
        if variable in variables:
            name = variables[variable]
            given[name] = text if name in _TEXTS else _parse_number(text)
            origin[name] = f"environment variable {variable}"
        elif variable.startswith(_FLOOR_PREFIX) and len(variable) > len(_FLOOR_PREFIX):
            value = _parse_number(text)
            if not _is_weight(value):
                raise ConfigError(
                    f"{variable} = {text!r} is not allowed; allowed: a number from 0 to 1"
                    " (from the environment)"
                )
            floors[variable[len(_FLOOR_PREFIX) :].lower()] = value
        elif _misspelt(variable, variables):
            raise ConfigError(_unknown(variable, tuple(variables), "the environment"))
    if floors:
        base = given.get("source_floors", DEFAULT_FLOORS)
        given["source_floors"] = {**base, **floors} if isinstance(base, Mapping) else base
        origin.setdefault("source_floors", f"environment variables {_FLOOR_PREFIX}*")


def _misspelt(variable: str, known: Iterable[str]) -> bool:
    """Say whether a variable looks like one of ours, misspelt."""
    names = [*known, *(_FLOOR_PREFIX + role.upper() for role in DEFAULT_FLOORS)]
    bare = [name.removeprefix("EVOKE_") for name in names]
    return bool(difflib.get_close_matches(variable.removeprefix("EVOKE_"), bare, cutoff=0.65))


def _parse_number(text: str) -> float | str:
    """Read an environment value; what is not a number stays text and fails validation by name."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _unknown(key: str, known: tuple[str, ...], source: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key!r} (from {source}){hint} Known: {', '.join(known)}"
