"""Which vLLM this package is made for, and one clear line where another one is installed.

Nothing of vLLM is imported here, so that the message comes before anything else can break.
"""

import os
import re

TESTED = ("0.24.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0")
"""Every release that a nox session tests, oldest first; those between are met by capability."""

OVERRIDE = "EVOKE_UNTESTED_VLLM"
"""Set to 1, this environment variable turns the refusal off."""


class UntestedVersionError(RuntimeError):
    """The vLLM installed is outside the tested range."""


def check(version: str) -> None:
    """Refuse a vLLM outside the tested range; patch releases of the newest are inside.

    A version without numbers (a checkout without tags) is let through: whoever builds vLLM knows
    what they do.

    Raises:
        UntestedVersionError: in one line that names the version, the range and the way out.
    """
    release = _release(version)
    if release is None or os.environ.get(OVERRIDE) == "1":
        return
    oldest, newest = _release(TESTED[0]), _release(TESTED[-1])
    assert oldest is not None
    assert newest is not None
    if not oldest <= release <= newest:
        raise UntestedVersionError(
            f"vLLM {version} is outside the range that evoke-vllm is tested with, {TESTED[0]} to "
            f"{TESTED[-1]}: install one of those, or set {OVERRIDE}=1 to try this one"
        )


def _release(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
