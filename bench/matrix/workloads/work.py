"""What a workload is: requests in order, and what they add up to.

A request is a prompt of token ids with, where the answer is scored, what it must hold. With
arrival times the requests are sent when they are due (open loop), without them one after the
other (closed loop). Everything follows from the options and the seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.errors import UsageProblem

Encode = Callable[[str], list[int]]
"""Turns text into token ids, adding none of its own."""


@dataclass(frozen=True)
class Request:
    """One request.

    `context` names what it is about, `kind` is "hot", "cold" or "all", `loop` counts from 1.
    `expected`: texts of which each must be in the answer, empty where nothing is scored;
    `as_json`: the answer must be a JSON object with these as its values, in order.
    `arrival_s`: seconds after the start at which it is sent, None in a closed loop.
    """

    context: str
    kind: str
    loop: int
    prompt: tuple[int, ...]
    answer_tokens: int
    expected: tuple[str, ...] = ()
    as_json: bool = False
    arrival_s: float | None = None
    params: Mapping[str, Any] | None = None


@dataclass
class Ask:
    """What a workload is made from; `read` collects the options that it knows."""

    seed: int
    encode: Encode
    options: Mapping[str, Any]
    block_size: int
    files: Mapping[str, Path] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def number(self, name: str, default: int, least: int = 1) -> int:
        """Return an option that is a whole number of at least `least`."""
        value = self._option(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageProblem(f"option {name} must be a whole number from {least} on: {value!r}")
        return value

    def real(self, name: str, default: float) -> float:
        """Return an option that is a number above 0."""
        value = self._option(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UsageProblem(f"option {name} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return an option that is true or false."""
        value = self._option(name, default)
        if not isinstance(value, bool):
            raise UsageProblem(f"option {name} must be true or false, not {value!r}")
        return value

    def random(self, what: str) -> Random:
        """Return a generator of its own for one part of a workload."""
        return Random(f"{self.seed}/{what}")

    def _option(self, name: str, default: Any) -> Any:
        self.read.add(name)
        return self.options.get(name, default)


@dataclass(frozen=True)
class Work:
    """A workload's requests. `hot_blocks` is what its hot set holds, or 0 where it has none."""

    requests: tuple[Request, ...]
    block_size: int
    hot_blocks: int = 0
    notes: tuple[str, ...] = ()

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent when they are due, not when the one before is answered."""
        return any(request.arrival_s is not None for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(len(each.prompt) + each.answer_tokens for each in self.requests)

    @property
    def all_blocks(self) -> int:
        """The different full blocks of all prompts: the working set."""
        return len(set().union(*self.chains()))

    def chains(self) -> list[list[int]]:
        """Return each request's full blocks, head first, as numbers that name their prefix too."""
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        return [self._chain(request.prompt, numbers) for request in self.requests]

    def _chain(
        self, prompt: Sequence[int], numbers: dict[tuple[int, tuple[int, ...]], int]
    ) -> list[int]:
        chain: list[int] = []
        parent = -1
        for start in range(0, len(prompt) - self.block_size + 1, self.block_size):
            content = tuple(prompt[start : start + self.block_size])
            parent = numbers.setdefault((parent, content), len(numbers))
            chain.append(parent)
        return chain
