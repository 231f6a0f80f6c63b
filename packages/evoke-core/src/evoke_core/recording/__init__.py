"""The flight recorder: what a tier was asked for and what it did, written and read again.

An adapter drives a :class:`Recorder`. What it wrote is a trace for ``evoke replay`` (what would
twice the memory, or another policy, have given?) and what ``evoke explain`` reads (why did this
request miss?).

This package writes files and starts a thread. The rest of ``evoke_core`` (the ledger, the index,
the policies) does neither, and imports nothing from here.
"""

from evoke_core.recording.explain import Explanation, Stretch, explain, worst
from evoke_core.recording.reader import (
    Event,
    RecordedRequest,
    Recording,
    RecordingError,
    is_recording,
    read_recording,
)
from evoke_core.recording.recorder import Recorder

__all__ = [
    "Event",
    "Explanation",
    "RecordedRequest",
    "Recorder",
    "Recording",
    "RecordingError",
    "Stretch",
    "explain",
    "is_recording",
    "read_recording",
    "worst",
]
