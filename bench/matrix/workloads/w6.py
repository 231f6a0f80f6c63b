"""W6, the budget below the hot set: the shape of W1S with a hot set that no tier here can hold.

The published results call this the third regime: policies collapse together, and the knob is
`store_threshold`, which keeps out what was asked for only once. Arms with and without it run at the
same budgets.

Options: those of W1S; the default hot set is larger.
"""

from dataclasses import replace

from bench.matrix.workloads import w1s
from bench.matrix.workloads.work import Ask, Work


def make(ask: Ask) -> Work:
    """Return the requests of W1S with eight hot contexts and two cold ones in each loop."""
    sized = replace(ask, options={"hot": 8, "cold": 2, **ask.options})
    return w1s.make(sized)
