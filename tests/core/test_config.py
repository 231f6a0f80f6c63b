# SPDX-License-Identifier: Apache-2.0
"""EvokeConfig: what an operator may write, and what a mistake tells him in one line."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import ConfigError, EvokeConfig

KEYS = (
    "w_recency",
    "w_reuse",
    "w_attention",
    "w_coherence",
    "recency_half_life",
    "source_floors",
    "policy",
    "ghost_factor",
    "max_pinned_fraction",
    "max_session_fraction",
    "record_trace",
    "record_trace_mib",
)
VARIABLES = {
    "EVOKE_W_RECENCY": "w_recency",
    "EVOKE_W_REUSE": "w_reuse",
    "EVOKE_W_ATTENTION": "w_attention",
    "EVOKE_W_COHERENCE": "w_coherence",
    "EVOKE_RECENCY_HALF_LIFE": "recency_half_life",
    "EVOKE_POLICY": "policy",
    "EVOKE_GHOST_FACTOR": "ghost_factor",
    "EVOKE_MAX_PINNED_FRACTION": "max_pinned_fraction",
    "EVOKE_MAX_SESSION_FRACTION": "max_session_fraction",
    "EVOKE_RECORD_TRACE_MIB": "record_trace_mib",
}


def load(mapping: object = None, **environ: str) -> EvokeConfig:
    return EvokeConfig.load(mapping, environ=environ)  # type: ignore[arg-type]


def refusal(mapping: object = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(mapping, **environ)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_defaults() -> None:
    config = load()
    assert config == EvokeConfig()
    assert (config.w_recency, config.w_reuse) == (0.5, 0.5)
    assert (config.w_attention, config.w_coherence) == (0.0, 0.0)
    assert config.recency_half_life == "auto"
    assert config.source_floors == {"system": 0.6, "user": 0.6, "assistant": 0.5}
    assert config.policy == "adaptive"
    assert config.ghost_factor == 4
    assert config.max_pinned_fraction == 0.25
    assert config.max_session_fraction == 1.0
    assert config.record_trace is None
    assert config.record_trace_mib == 256


@pytest.mark.parametrize(
    ("mapping", "environ"),
    [
        ({"w_recency": 0.5}, {}),
        ({"recency_half_life": 64}, {}),
        ({}, {"EVOKE_W_REUSE": "0.5"}),
    ],
)
def test_weights_without_a_policy_select_the_formula_and_say_so(
    mapping: dict[str, object], environ: dict[str, str]
) -> None:
    said: list[str] = []
    config = EvokeConfig.load(mapping, environ=environ, say=said.append)
    assert config.policy == "scored"
    (line,) = said
    assert "policy is scored" in line


def test_a_named_policy_stays_and_nothing_is_said() -> None:
    said: list[str] = []
    mapping = {"w_recency": 0.5, "policy": "adaptive"}
    assert EvokeConfig.load(mapping, environ={}, say=said.append).policy == "adaptive"
    assert said == []


def test_weights_given_in_python_select_the_formula() -> None:
    assert EvokeConfig(w_recency=0.6, w_reuse=0.4).policy == "scored"
    assert EvokeConfig(recency_half_life=64).policy == "scored"
    assert EvokeConfig(source_floors={}).policy == "adaptive"


def test_every_key_is_taken_from_the_mapping() -> None:
    given_values = {
        "w_recency": 0.1,
        "w_reuse": 0.2,
        "w_attention": 0.3,
        "w_coherence": 0.4,
        "recency_half_life": 12,
        "source_floors": {"tool": 0.25},
        "policy": "lru",
        "ghost_factor": 2,
        "max_pinned_fraction": 0.5,
        "max_session_fraction": 0.125,
        "record_trace": "afternoon.gz",
        "record_trace_mib": 1.5,
    }
    assert set(given_values) == set(KEYS)
    config = load(given_values)
    assert {key: getattr(config, key) for key in KEYS} == given_values


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EvokeConfig().policy = "lru"  # type: ignore[misc]


WRONG = [
    *[(f"w_{weight}", value) for weight in ("recency", "reuse", "attention", "coherence")
      for value in (-0.1, 1.5, "much", None, True, math.nan, math.inf, [0.5])],
    *[("recency_half_life", value) for value in (0, -1, "Auto", "", None, True, math.nan)],
    *[("source_floors", value) for value in (
        None, 0.5, [("user", 0.5)], {"user": 2}, {"user": -1}, {"user": "x"}, {"user": True},
        {"user": math.nan}, {3: 0.5}, {"user": None})],
    *[("policy", value) for value in ("LRU", "arc", "", None, 3, ["lru"])],
    *[("ghost_factor", value) for value in (-1, "many", None, True, math.nan, math.inf)],
    *[("max_pinned_fraction", value) for value in (-0.1, 1.1, "0.5", None, True, math.nan)],
    *[("max_session_fraction", value) for value in (0, -0.1, 1.1, "off", None, False, math.nan)],
    *[("record_trace", value) for value in ("", 3, True, ["a"], b"a")],
    *[("record_trace_mib", value) for value in (0.5, -1, "1", None, True, math.nan, math.inf)],
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_value_is_named_with_its_origin_and_what_is_allowed(
    key: str, value: object
) -> None:
    message = refusal({key: value})
    assert key in message
    assert repr(value) in message
    assert "allowed" in message
    assert "from evoke" in message


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_the_constructor_refuses_the_same(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        EvokeConfig(**{key: value})


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("mapping", [[], "scored", 3, True, [("policy", "lru")]])
def test_something_that_is_no_mapping(mapping: object) -> None:
    assert repr(mapping) in refusal(mapping)


def test_the_origin_can_be_named_by_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\['evoke'\]"):
        EvokeConfig.load({"policy": 1}, environ={}, source="kv_connector_extra_config['evoke']")


@pytest.mark.parametrize(
    ("weights", "fits"),
    [
        ((1.0, 0.0, 0.0, 0.0), True),
        ((0.1, 0.2, 0.3, 0.4), True),
        ((0.7, 0.1, 0.1, 0.1), True),  # sums to 1 + a rounding error
        ((0.0, 0.0, 0.0, 0.0), True),
        ((0.6, 0.5, 0.0, 0.0), False),
        ((0.5, 0.5, 0.01, 0.0), False),
    ],
)
def test_weights_sum_to_at_most_one(weights: tuple[float, ...], fits: bool) -> None:
    mapping = dict(zip(KEYS, weights, strict=False))
    if fits:
        assert load(mapping).w_recency == weights[0]
        return
    message = refusal(mapping)
    assert "sum" in message
    assert "at most 1" in message
    assert "from evoke" in message


def test_a_sum_beyond_one_names_both_origins() -> None:
    message = refusal({"w_reuse": 0.4}, EVOKE_W_RECENCY="0.7")
    assert "EVOKE_W_RECENCY" in message
    assert "from evoke" in message or ", evoke" in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("w_recensy", "w_recency"),
        ("recency_halflife", "recency_half_life"),
        ("ghost_facto", "ghost_factor"),
        ("Policy", "policy"),
        ("source_floor", "source_floors"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(written: str, meant: str) -> None:
    message = refusal({written: 1})
    assert repr(written) in message
    assert f"did you mean {meant}?" in message
    assert "from evoke" in message


@pytest.mark.parametrize("key", [3, None, ("w_reuse",), ""])
def test_a_key_that_is_no_text(key: object) -> None:
    assert "unknown key" in refusal({key: 1})


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("variable", "key"), VARIABLES.items())
def test_the_environment_wins(variable: str, key: str) -> None:
    text, value = ("lru", "lru") if key == "policy" else ("0.25", 0.25)
    others = dict.fromkeys({"w_recency", "w_reuse"} - {key}, 0.0)
    mapping: dict[str, object] = {**others, key: "scored" if key == "policy" else 0.5}
    if key == "record_trace_mib":
        text, value, mapping = "2.5", 2.5, {**others, key: 4}
    assert getattr(load(mapping, **{variable: text}), key) == value
    assert getattr(load(others, **{variable: text}), key) == value


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("text", ["much", "", "nan", "-1", "0,5", "True"])
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    message = refusal(**{variable: text})
    assert variable in message
    assert "allowed" in message


def test_a_variable_that_wins_is_the_one_to_blame() -> None:
    message = refusal({"w_recency": 0.5}, EVOKE_W_RECENCY="much")
    assert "'much'" in message
    assert "environment" in message
    assert "from evoke)" not in message


def test_a_recording_from_the_environment() -> None:
    config = load({"record_trace": "here"}, EVOKE_RECORD_TRACE="there/1.gz")
    assert config.record_trace == "there/1.gz"
    assert load(EVOKE_RECORD_TRACE="7").record_trace == "7"
    message = refusal(EVOKE_RECORD_TRACE="")
    assert "EVOKE_RECORD_TRACE" in message
    assert "allowed" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_pinned_fraction", 0),
        ("max_pinned_fraction", 1),
        ("max_session_fraction", 1),
        ("max_session_fraction", 1e-6),
        ("record_trace_mib", 1),
        ("record_trace", None),
    ],
)
def test_the_ends_of_a_range_are_allowed(key: str, value: object) -> None:
    config = load({key: value})
    assert getattr(config, key) == value
    assert config.policy == "adaptive", "limits choose no policy"


def test_auto_half_life_from_the_environment() -> None:
    assert (
        load({"recency_half_life": 3}, EVOKE_RECENCY_HALF_LIFE="auto").recency_half_life == "auto"
    )


def test_floors_by_role() -> None:
    config = load({"source_floors": {"user": 0.1, "tool": 0.2}}, EVOKE_FLOOR_USER="0.9")
    assert config.source_floors == {"user": 0.9, "tool": 0.2}
    config = load(EVOKE_FLOOR_TOOL="0.3")
    assert config.source_floors == {"system": 0.6, "user": 0.6, "assistant": 0.5, "tool": 0.3}


@pytest.mark.parametrize("text", ["2", "-0.1", "high", "nan", ""])
def test_a_wrong_floor_names_its_variable(text: str) -> None:
    message = refusal(EVOKE_FLOOR_USER=text)
    assert "EVOKE_FLOOR_USER" in message
    assert "allowed" in message
    assert "environment" in message


def test_a_floor_from_the_environment_does_not_hide_wrong_floors_in_the_mapping() -> None:
    message = refusal({"source_floors": {"user": 7}}, EVOKE_FLOOR_TOOL="0.5")
    assert "source_floors" in message
    assert "from evoke" in message


@pytest.mark.parametrize(
    "variable",
    ["EVOKE_W_RECENSY", "EVOKE_WREUSE", "EVOKE_HALF_LIFE", "EVOKE_POLICI", "EVOKE_FLOORS_USER"],
)
def test_a_misspelt_variable_is_refused(variable: str) -> None:
    message = refusal(**{variable: "0.5"})
    assert variable in message
    assert "did you mean" in message


@pytest.mark.parametrize("variable", ["EVOKE_HOME", "EVOKE_TEST_WHEELS", "EVOKE_LOG", "PATH"])
def test_other_variables_are_not_ours(variable: str) -> None:
    assert load(**{variable: "/somewhere"}) == EvokeConfig()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "lru")
    assert EvokeConfig.load().policy == "lru"
    assert EvokeConfig.load(environ={}).policy == "adaptive"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), anything, max_size=4) | anything
)
def test_anything_else_is_refused_in_one_line_or_honoured(mapping: object) -> None:
    try:
        message = repr(load(mapping))
    except ConfigError as error:
        message = str(error)
    assert message
    assert "\n" not in message


def test_an_adapter_names_the_policy_that_holds_unless_another_is_named() -> None:
    assert EvokeConfig.load(default_policy="lru", environ={}).policy == "lru"
    assert EvokeConfig.load({"policy": "adaptive"}, default_policy="lru", environ={}).policy == (
        "adaptive"
    )
    assert EvokeConfig.load({"w_reuse": 0.2}, default_policy="lru", environ={}).policy == "scored"
    by_environment = EvokeConfig.load(default_policy="lru", environ={"EVOKE_POLICY": "scored"})
    assert by_environment.policy == "scored"
