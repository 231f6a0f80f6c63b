# SPDX-License-Identifier: Apache-2.0
"""Re-anchoring against rotating from scratch, and frequencies against their published formulas."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core.rope import Rope, RopeError

EPS = float(np.finfo(np.float32).eps)
BASE = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {**BASE, "rope_theta": 10_000.0},
    "large base, own head_dim": {**BASE, "head_dim": 128, "rope_theta": 1e6},
    "linear": {**BASE, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {
        **BASE,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    },
    "yarn": {
        **BASE,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn, not truncated": {
        **BASE,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 2048,
        },
    },
    "yarn, two scales": {
        **BASE,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 4096,
        },
    },
    "partial": {**BASE, "partial_rotary_factor": 0.25},
}

ropes = st.builds(
    lambda name, interleaved: Rope.from_config(CONFIGS[name], interleaved=interleaved),
    st.sampled_from(sorted(CONFIGS)),
    st.booleans(),
)
positions = st.lists(st.integers(0, 131_072), min_size=5, max_size=5).map(np.array)


def raw_keys(rope: Rope, seed: int = 0, tokens: int = 5) -> np.ndarray[Any, Any]:
    """Keys of two heads, some elements large, as real models have them."""
    draw = np.random.default_rng(seed)
    keys = draw.standard_normal((2, tokens, rope.head_dim))
    return (keys * np.exp(draw.normal(0, 2, rope.head_dim))).astype(np.float32)


def pair_lengths(rope: Rope, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The length of the pair that each element belongs to: what rounding is relative to."""
    lengths = np.abs(keys).astype(np.float64)
    pairs = len(rope.inv_freq)
    for i in range(pairs):
        x, y = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + pairs)
        lengths[..., x] = lengths[..., y] = np.hypot(keys[..., x], keys[..., y], dtype=np.float64)
    return lengths


def assert_equal_to_rounding(
    rope: Rope, found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], units: float
) -> None:
    assert found.dtype == wanted.dtype
    error = np.abs(found.astype(np.float64) - wanted)
    assert (error <= units * EPS * pair_lengths(rope, wanted)).all()


@given(ropes, positions, positions, st.integers(0, 2**32 - 1))
def test_reanchored_is_rotated_from_scratch(
    rope: Rope, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], seed: int
) -> None:
    raw = raw_keys(rope, seed)
    found = rope.reanchor(rope.rotate(raw, old), old, new)
    assert_equal_to_rounding(rope, found, rope.rotate(raw, new), 4)


@given(ropes, positions, positions, st.integers(0, 2**32 - 1))
def test_there_and_back(
    rope: Rope, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], seed: int
) -> None:
    keys = rope.rotate(raw_keys(rope, seed), old)
    back = rope.reanchor(rope.reanchor(keys, old, new), new, old)
    assert_equal_to_rounding(rope, back, keys, 4)


@given(ropes, positions, st.integers(0, 2**32 - 1))
def test_in_double_precision_by_the_definition(
    rope: Rope, at: np.ndarray[Any, Any], seed: int
) -> None:
    """One pair at a time, with complex numbers: exp(i * angle) times the attention factor."""
    raw = raw_keys(rope, seed)
    wanted = raw.astype(np.float64)
    pairs = len(rope.inv_freq)
    for i in range(pairs):
        x, y = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + pairs)
        angle = (at.astype(np.float32) * rope.inv_freq[i]).astype(np.float64)
        turned = (raw[..., x] + 1j * raw[..., y]) * rope.attention_factor * np.exp(1j * angle)
        wanted[..., x], wanted[..., y] = turned.real, turned.imag
    assert_equal_to_rounding(rope, rope.rotate(raw, at), wanted.astype(np.float32), 4)


def test_a_move_to_the_same_place_changes_no_bit() -> None:
    for config in CONFIGS.values():
        rope = Rope.from_config(config)
        keys = rope.rotate(raw_keys(rope), np.arange(5))
        moved = rope.reanchor(keys, np.arange(5), np.arange(5))
        assert moved is not keys
        np.testing.assert_array_equal(moved, keys)


def test_scores_depend_on_distance_only() -> None:
    """What rotary embedding is for: a query and a key that move together keep their product."""
    rope = Rope.from_config(CONFIGS["default"])
    query, key = raw_keys(rope, 1, 1)[0, 0], raw_keys(rope, 2, 1)[0, 0]
    near = rope.rotate(query, 105) @ rope.rotate(key, 100)
    far = rope.rotate(query, 2005) @ rope.reanchor(rope.rotate(key, 100), 100, 2000)
    assert far == pytest.approx(near, rel=1e-3)
    assert rope.rotate(query, 305) @ rope.rotate(key, 100) != pytest.approx(near, rel=1e-2)


def test_layouts_differ_in_the_order_of_elements_only() -> None:
    halves, turns = (
        Rope.from_config(CONFIGS["yarn"], interleaved=value) for value in (False, True)
    )
    raw = raw_keys(halves)
    order = np.arange(halves.head_dim).reshape(2, -1).T.ravel()  # 0, 32, 1, 33, ...
    np.testing.assert_array_equal(
        turns.rotate(raw[..., order], np.arange(5)), halves.rotate(raw, np.arange(5))[..., order]
    )
    assert (turns.rotate(raw, np.arange(5)) != halves.rotate(raw, np.arange(5))).any()


def test_partial_rotary_leaves_the_rest_alone() -> None:
    rope = Rope.from_config(CONFIGS["partial"])
    assert (rope.head_dim, 2 * len(rope.inv_freq)) == (64, 16)
    raw = raw_keys(rope)
    moved = rope.rotate(raw, np.arange(1, 6))
    np.testing.assert_array_equal(moved[..., 16:], raw[..., 16:])
    assert (moved[..., :16] != raw[..., :16]).all()


def test_between_lengths_of_a_dynamic_model() -> None:
    """A key rotated for a short sequence lands in a long one, whose frequencies are others."""
    short = Rope.from_config(CONFIGS["dynamic"])
    long = Rope.from_config(CONFIGS["dynamic"], seq_len=20_000)
    raw, old, new = raw_keys(short), np.arange(5), np.arange(15_000, 15_005)
    found = short.reanchor(short.rotate(raw, old), old, new, to=long)
    assert_equal_to_rounding(short, found, long.rotate(raw, new), 4)
    assert np.abs(short.reanchor(short.rotate(raw, old), old, new) - found).max() > 0.1


def test_between_attention_factors() -> None:
    plain = Rope(np.array([1.0, 0.1]), 4)
    scaled = Rope(np.array([1.0, 0.1]), 4, attention_factor=1.5)
    raw, old, new = raw_keys(plain), np.arange(5), np.arange(7, 12)
    found = plain.reanchor(plain.rotate(raw, old), old, new, to=scaled)
    assert_equal_to_rounding(plain, found, scaled.rotate(raw, new), 4)


def test_any_layout_of_tokens_and_heads_and_narrow_types() -> None:
    rope = Rope.from_config(CONFIGS["default"])
    raw, at = raw_keys(rope), np.arange(5)
    tokens_first = rope.rotate(raw.swapaxes(0, 1), at[:, None])
    np.testing.assert_array_equal(tokens_first, rope.rotate(raw, at).swapaxes(0, 1))
    half = rope.rotate(raw.astype(np.float16), at)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, rope.rotate(raw, at), rtol=2e-3, atol=1e-2)
    double = Rope(rope.inv_freq.astype(np.float64), rope.head_dim)
    there = double.reanchor(double.rotate(raw.astype(np.float64), at), at, at + 1_000_000)
    np.testing.assert_allclose(
        there, double.rotate(raw.astype(np.float64), at + 1_000_000), rtol=1e-12, atol=1e-12
    )


def test_frequencies_by_hand() -> None:
    """head_dim 64: pair i turns base ** (-i / 32) radians per position."""
    default = Rope.from_config(CONFIGS["default"]).inv_freq
    np.testing.assert_allclose(default, 10_000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    linear = Rope.from_config(CONFIGS["linear"]).inv_freq
    np.testing.assert_allclose(linear, default / 4, rtol=1e-6)

    # Twice the length at factor 2: base * (2 * 2 - 1) ** (64 / 62); up to the length, unchanged.
    dynamic = Rope.from_config(CONFIGS["dynamic"], seq_len=16_384).inv_freq
    np.testing.assert_allclose(
        dynamic, (10_000.0 * 3 ** (64 / 62)) ** (-np.arange(32) / 32), rtol=1e-6
    )
    for shorter in (None, 100, 8192):
        same = Rope.from_config(CONFIGS["dynamic"], seq_len=shorter).inv_freq
        np.testing.assert_array_equal(same, default)

    llama3 = Rope.from_config(CONFIGS["llama3"]).inv_freq
    plain = 500_000.0 ** (-np.arange(32) / 32)
    waves = 2048 * plain / (2 * math.pi)  # wavelengths in the original length
    np.testing.assert_allclose(llama3[waves >= 4], plain[waves >= 4], rtol=1e-6)
    np.testing.assert_allclose(llama3[waves <= 1], plain[waves <= 1] / 8, rtol=1e-6)
    between = (waves > 1) & (waves < 4)
    assert between.any()
    assert (llama3[between] < plain[between]).all()
    assert (llama3[between] > plain[between] / 8).all()

    yarn = Rope.from_config(CONFIGS["yarn"])
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    plain = 150_000.0 ** (-np.arange(32) / 32)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(yarn.inv_freq[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(yarn.inv_freq[turns < 0.7], plain[turns < 0.7] / 32, rtol=1e-6)
    two = Rope.from_config(CONFIGS["yarn, two scales"]).attention_factor
    assert two == pytest.approx((0.1 * math.log(40) + 1) / (0.08 * math.log(40) + 1))
    assert Rope.from_config(CONFIGS["yarn, not truncated"]).attention_factor == 1.25


@pytest.mark.parametrize(
    "config",
    [
        {**BASE, "rope_scaling": {"type": "longrope", "factor": 4.0}},
        {**BASE, "rope_scaling": {"type": "linear"}},
        {**BASE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"num_attention_heads": 8},
        {**BASE, "rope_parameters": "none"},
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RopeError):
        Rope.from_config(config)


def test_what_does_not_fit_is_refused() -> None:
    rope = Rope.from_config(CONFIGS["default"])
    with pytest.raises(RopeError, match="do not end in heads of 64"):
        rope.rotate(np.zeros((3, 32), np.float32), np.arange(3))
    with pytest.raises(RopeError, match="same elements"):
        rope.reanchor(np.zeros((1, 64), np.float32), 0, 1, to=Rope.from_config(CONFIGS["partial"]))
    for bad in (np.zeros((2, 2)), np.zeros(0), np.zeros(3)):
        with pytest.raises(RopeError, match="does not fit"):
            Rope(bad, 4)
    with pytest.raises(RopeError, match="positive"):
        Rope(np.ones(2), 4, attention_factor=0.0)


def test_frequencies_are_those_of_transformers() -> None:
    """Every variant, by the library that most models are published for."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers").LlamaConfig
    checked = set()
    for name, settings in CONFIGS.items():
        theirs = configuration(**settings)
        variant = theirs.rope_parameters["rope_type"]
        if name == "partial":
            continue  # Llama's own default ignores the share; the scaled variants know it
        for seq_len in (None, 30_000) if variant == "dynamic" else (None,):
            if variant == "default":
                compute = llama.LlamaRotaryEmbedding.compute_default_rope_parameters
                wanted, factor = compute(theirs)
            else:
                wanted, factor = utils.ROPE_INIT_FUNCTIONS[variant](theirs, seq_len=seq_len)
            found = Rope.from_config(settings, seq_len=seq_len)
            np.testing.assert_allclose(found.inv_freq, wanted.numpy(), rtol=2e-6, err_msg=name)
            assert found.attention_factor == pytest.approx(factor)
        checked.add(variant)
    assert checked == {"default", "linear", "dynamic", "llama3", "yarn"}
