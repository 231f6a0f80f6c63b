"""How many requests arrive in a second, from the times that adapters stamp on requests.

The index counts time in requests; what clients say comes in seconds. Without a clock, nothing is
measured and nothing can be said of seconds.
"""

import math

from attrs import define

_MEMORY = 256
"""Requests after which an observed interval has decayed to 1/e."""

_DECAY = math.exp(-1.0 / _MEMORY)


@define
class Pace:
    """The time, and the rate of arrivals."""

    now: float = -math.inf
    _requests: float = 0.0
    _seconds: float = 0.0

    def arrived(self, now: float) -> None:
        """A request arrived; time never goes back."""
        passed = now - self.now
        if passed > 0.0:
            if not math.isinf(passed):
                self._seconds = self._seconds * _DECAY + passed
                self._requests = self._requests * _DECAY + 1.0
            self.now = now
        else:
            self._seconds *= _DECAY
            self._requests = self._requests * _DECAY + 1.0

    @property
    def per_second(self) -> float:
        """Requests per second; one before any time has passed."""
        return self._requests / self._seconds if self._seconds > 0.0 else 1.0
