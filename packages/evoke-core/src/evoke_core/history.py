"""What is known of a block's past, whether it is resident or only remembered."""

from typing import Protocol

from attrs import define

from evoke_core.terms import NO_TERMS, Terms


class History(Protocol):
    """The past of blocks that share one: a resident run's, or a :class:`Past`.

    Attributes:
        reuse: distinct requests that touched the blocks.
        last: tick of the most recent of them.
        gap: requests between the last two touches, where the policy keeps it, else 0.
        role, priority: the living claims, see :class:`~evoke_core.runs.Run`.
        terms: what clients declared beyond these.
        owed: whether the promise in the terms was neither kept nor broken when last looked at.
    """

    @property
    def reuse(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def gap(self) -> int: ...
    @property
    def role(self) -> str | None: ...
    @property
    def priority(self) -> float: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def owed(self) -> bool: ...


@define(eq=False)
class Past:
    """The history of blocks when they left together; ``disturbed`` once some have come back."""

    reuse: int
    last: int
    gap: int
    role: str | None
    priority: float
    terms: Terms = NO_TERMS
    owed: bool = False
    disturbed: bool = False

    @classmethod
    def of(cls, history: History) -> "Past":
        return cls(
            history.reuse,
            history.last,
            history.gap,
            history.role,
            history.priority,
            history.terms,
            history.owed,
        )
