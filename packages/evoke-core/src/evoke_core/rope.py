"""Rotary position embedding: moving keys from the positions they were rotated for to others.

A cached key is rotated by its position. A runtime that closes the gap an evicted block left, or
lands a restored block elsewhere, turns it on instead of computing it again: rotations add up, so a
key at position ``p`` becomes one at position ``q`` by a rotation through ``angle(q) - angle(p)``.
Values are not rotated and move as they are.

Guarantees: :meth:`Rope.reanchor` of a key rotated for ``old`` equals, to a few units in the last
place of float32 per pair, :meth:`Rope.rotate` of the raw key for ``new``. Angles are formed the way
the runtime forms them, in the type of ``inv_freq``, and only their difference is taken in double
precision: what a float32 runtime rounds off at position 100,000 is rounded off here too, at both
ends. Moving a key again and again adds up rounding errors, a few units each time.

Scaling variants change the frequencies and may scale the keys (YaRN); dynamic NTK makes frequencies
depend on the sequence's length, so that keys may move from one set of frequencies to another.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

Array = npt.NDArray[Any]
VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Scaling variants that :meth:`Rope.from_config` knows."""


class RopeError(ValueError):
    """A model's rotary settings that are not understood, or arrays that do not fit together."""


def _as_frequencies(value: Any) -> Array:
    found = np.array(value)
    if found.dtype not in (np.float32, np.float64):
        found = found.astype(np.float32)
    found.setflags(write=False)
    return found


@frozen(eq=False)
class Rope:
    """How one model rotates its keys.

    Attributes:
        inv_freq: radians per position, one for each rotated pair; float32 as runtimes keep them, or
            float64, in which case angles are formed in float64 as well. A runtime best passes its
            own.
        head_dim: elements of a key; those beyond ``2 * len(inv_freq)`` are not rotated (partial
            rotary).
        attention_factor: what rotated elements are multiplied by besides (YaRN); else 1.
        interleaved: pairs are elements (2i, 2i + 1) as in GPT-J, not (i, i + half) as in NeoX.
    """

    inv_freq: Array = field(converter=_as_frequencies)
    head_dim: int
    attention_factor: float = 1.0
    interleaved: bool = False

    def __attrs_post_init__(self) -> None:
        if self.inv_freq.ndim != 1 or not 0 < 2 * len(self.inv_freq) <= self.head_dim:
            raise RopeError(
                f"inv_freq of shape {self.inv_freq.shape} does not fit a head of {self.head_dim}"
            )
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise RopeError(f"attention_factor must be positive, got {self.attention_factor}")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, seq_len: int | None = None, interleaved: bool = False
    ) -> "Rope":
        """Read a Hugging Face ``config.json``: old (``rope_scaling``) or new (``rope_parameters``).

        ``seq_len`` is the length that dynamic NTK stretches to; other variants ignore it. Where
        frequencies differ by kind of layer, give one kind's ``rope_parameters``.

        Raises:
            RopeError: a variant that is not in ``VARIANTS``, or a setting that is missing.
        """
        try:
            return _from_config(cls, config, seq_len, interleaved)
        except (KeyError, TypeError) as error:
            raise RopeError(f"rotary settings incomplete or not understood: {error}") from None

    def angles(self, positions: npt.ArrayLike) -> Array:
        """Radians of ``positions``, shape (..., pairs), formed in ``inv_freq``'s type."""
        at = np.asarray(positions).astype(self.inv_freq.dtype)
        return (at[..., None] * self.inv_freq).astype(np.float64)

    def rotate(self, raw: Array, positions: npt.ArrayLike) -> Array:
        """Rotate raw keys (or queries), as the model does.

        Args:
            raw: shape (..., head_dim), any layout; float32, float64, or a narrower type, which is
                computed in float32.
            positions: broadcast against ``raw.shape[:-1]``: for keys of shape (heads, tokens,
                head_dim) an array of length tokens.

        Returns:
            A new array of ``raw``'s shape and type.
        """
        return self._turn(raw, self.angles(positions), self.attention_factor)

    def reanchor(
        self,
        keys: Array,
        old: npt.ArrayLike,
        new: npt.ArrayLike,
        *,
        to: "Rope | None" = None,
    ) -> Array:
        """Move keys that were rotated for positions ``old`` to positions ``new``.

        Args:
            keys: shape (..., head_dim), as :meth:`rotate` returns them.
            old, new: positions, each broadcast against ``keys.shape[:-1]``.
            to: the rotation in force at the new place where it is another (dynamic NTK at another
                length); by default this one.

        Returns:
            A new array of ``keys``' shape and type.

        Raises:
            RopeError: ``to`` rotates other elements than this.
        """
        target = self if to is None else to
        if self._shape != target._shape:
            raise RopeError("keys can only move between rotations of the same elements")
        angles = target.angles(new) - self.angles(old)
        return self._turn(keys, angles, target.attention_factor / self.attention_factor)

    @property
    def _shape(self) -> tuple[int, int, bool]:
        return len(self.inv_freq), self.head_dim, self.interleaved

    def _turn(self, keys: Array, angles: Array, factor: float) -> Array:
        """Rotate each pair of ``keys`` by ``angles``, times ``factor``."""
        if keys.shape[-1:] != (self.head_dim,):
            raise RopeError(f"keys of shape {keys.shape} do not end in heads of {self.head_dim}")
        kind = np.result_type(keys.dtype, np.float32)
        cos = (np.cos(angles) * factor).astype(kind)
        sin = (np.sin(angles) * factor).astype(kind)
        pairs = len(self.inv_freq)
        first: slice = slice(0, 2 * pairs, 2) if self.interleaved else slice(0, pairs)
        second: slice = slice(1, 2 * pairs, 2) if self.interleaved else slice(pairs, 2 * pairs)
        turned = keys.astype(kind)  # a copy: what is not rotated stays as it is
        x, y = keys[..., first].astype(kind), keys[..., second].astype(kind)
        turned[..., first] = x * cos - y * sin
        turned[..., second] = y * cos + x * sin
        return turned.astype(keys.dtype, copy=False)


def _from_config(
    cls: type[Rope], config: Mapping[str, Any], seq_len: int | None, interleaved: bool
) -> Rope:
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    variant = settings.get("rope_type") or settings.get("type") or "default"
    if variant not in VARIANTS:
        raise RopeError(f"rotary variant {variant!r} is not one of {', '.join(VARIANTS)}")
    base = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * share)
    attention_factor = 1.0
    if variant == "dynamic":
        longest = config["max_position_embeddings"]
        factor = float(settings["factor"])
        stretch = factor * max(seq_len or longest, longest) / longest - (factor - 1.0)
        base *= stretch ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    inv_freq = base**-exponents
    if variant == "linear":
        inv_freq /= float(settings["factor"])
    elif variant == "llama3":
        inv_freq = _llama3(inv_freq, settings, _original(config, settings))
    elif variant == "yarn":
        original = _original(config, settings)
        factor = float(settings.get("factor") or config["max_position_embeddings"] / original)
        inv_freq = _yarn(inv_freq, settings, base, factor, original)
        attention_factor = _yarn_attention(settings, factor)
    return cls(inv_freq.astype(np.float32), head_dim, attention_factor, interleaved)


def _original(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The length the model was first trained for: beside the settings, in them, or its maximum."""
    key = "original_max_position_embeddings"
    found: int = config.get(key) or settings.get(key) or config["max_position_embeddings"]
    return found


def _llama3(inv_freq: Array, settings: Mapping[str, Any], original: int) -> Array:
    """Llama 3.1: long waves are stretched by the factor, short ones stay, between them a ramp.

    Long and short are counted in wavelengths that fit into the original length: fewer than
    ``low_freq_factor``, more than ``high_freq_factor``.
    """
    factor, low = settings["factor"], settings["low_freq_factor"]
    fitting = original * inv_freq / (2.0 * math.pi)
    kept = np.clip((fitting - low) / (settings["high_freq_factor"] - low), 0.0, 1.0)
    found: Array = inv_freq * (kept + (1.0 - kept) / factor)
    return found


def _yarn(
    inv_freq: Array, settings: Mapping[str, Any], base: float, factor: float, original: int
) -> Array:
    """YaRN (Peng et al. 2023, "NTK-by-parts"): as Llama 3.1, but the ramp runs over the pairs.

    It runs from the pair that turns ``beta_fast`` times within the original length to the one that
    turns ``beta_slow`` times: pair ``i`` of ``dim / 2`` turns
    ``original * base ** (-2 i / dim) / (2 pi)`` times.
    """
    pairs = len(inv_freq)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2.0 * math.pi)) / math.log(base)

    first = pair_that_turns(settings.get("beta_fast") or 32)
    last = pair_that_turns(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (np.arange(pairs) - first) / ((last - first) or 0.001)
    kept = 1.0 - np.clip(ramp, 0.0, 1.0)
    found: Array = inv_freq * (kept + (1.0 - kept) / factor)
    return found


def _yarn_attention(settings: Mapping[str, Any], factor: float) -> float:
    """YaRN's attention factor, ``0.1 ln(factor) + 1``, or as the settings say (DeepSeek's two)."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    both = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(both[0]) / scale(both[1]) if both[0] and both[1] else scale(1.0)
