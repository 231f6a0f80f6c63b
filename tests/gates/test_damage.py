"""The damaged worker hurts exactly one block of a load, at vLLM's own boundary."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.engine

SLOTS, ROWS, PAGE = 8, 6, 128


class Blocks:
    """Stands for a transfer's specification: block ids of one side."""

    def __init__(self, *ids: int) -> None:
        self.block_ids = np.array(ids, dtype=np.int64)


class Handler:
    """Copies at submission, reports at the next poll; the tier's slot n holds the value n + 1."""

    def __init__(self, engine: Any, tier: Any, *, store: bool) -> None:
        self.engine, self.tier, self.store = engine, tier, store
        self.done: list[Any] = []

    def transfer_async(self, job_id: int, spec: tuple[Blocks, Blocks]) -> bool:
        source, target = (torch.from_numpy(side.block_ids) for side in spec)
        if self.store:
            self.tier[target] = self.engine[source]
        else:
            self.engine[target] = self.tier[source]
        self.done.append(type("Result", (), {"job_id": job_id})())
        return True

    def get_finished(self) -> list[Any]:
        done, self.done = self.done, []
        return done


class Machine:
    def __init__(self, kind: str, value_bytes: int = 4) -> None:
        from gates.damage import Damage

        self.engine = torch.full((ROWS, PAGE), 77, dtype=torch.int8)
        self.tier = torch.arange(1, SLOTS + 1, dtype=torch.int8)[:, None].repeat(1, PAGE)
        self.damage = Damage(kind, [self.engine], value_bytes)
        self.load = Handler(self.engine, self.tier, store=False)
        self.store = Handler(self.engine, self.tier, store=True)
        self.damage.wrap_handler(self.load, store=False)
        self.damage.wrap_handler(self.store, store=True)
        self.jobs = 0

    def restore(self, slots: list[int], rows: list[int]) -> list[int]:
        """Load, poll, and return the first value of each row."""
        self.jobs += 1
        assert self.load.transfer_async(self.jobs, (Blocks(*slots), Blocks(*rows)))
        assert [result.job_id for result in self.load.get_finished()] == [self.jobs]
        return [int(self.engine[row, 0]) for row in rows]


@pytest.mark.parametrize(("value_bytes", "at"), [(4, 67), (2, 33), (1, 16)])
def test_flip_inverts_one_high_byte_of_the_last_block(value_bytes: int, at: int) -> None:
    machine = Machine("flip", value_bytes)
    machine.restore([0, 1, 2], [3, 4, 5])
    expected = machine.tier[:3].clone()
    expected[2, at] = ~expected[2, at]
    assert torch.equal(machine.engine[3:], expected)
    assert machine.damage.done == 1
    assert (machine.engine[:3] == 77).all()


def test_stale_keeps_what_the_place_held() -> None:
    machine = Machine("stale")
    assert machine.restore([0, 1], [2, 3]) == [1, 77]
    assert machine.restore([4, 5, 6], [1, 2, 3]) == [5, 6, 77]
    assert machine.damage.done == 2


def test_swap_exchanges_blocks_of_different_loads_and_stays() -> None:
    machine = Machine("swap")
    assert machine.restore([0, 1], [0, 1]) == [1, 2]  # nothing to exchange with yet
    assert machine.restore([2, 3], [2, 3]) == [3, 2]
    assert machine.restore([0, 1], [0, 1]) == [1, 4]
    assert machine.restore([2, 3], [2, 3]) == [3, 2]
    assert machine.damage.done == 3


def test_swap_never_stays_within_one_context() -> None:
    machine = Machine("swap")
    machine.restore([0, 1], [0, 1])
    assert machine.restore([0, 1, 2], [0, 1, 2]) == [1, 2, 3]
    assert machine.damage.done == 0


def test_swap_forgets_a_slot_that_is_written_anew() -> None:
    machine = Machine("swap")
    machine.restore([0, 1], [0, 1])
    machine.restore([2, 3], [2, 3])
    machine.engine[5] = 50
    assert machine.store.transfer_async(99, (Blocks(5), Blocks(3)))
    assert machine.restore([1], [0]) == [2]


class Worker:
    """vLLM 0.25 and later: both directions in one object."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.load = Handler(machine.engine, machine.tier, store=False)
        self.store = Handler(machine.engine, machine.tier, store=True)

    def submit_load(self, job_id: int, source: Blocks, target: Blocks, expedited: bool) -> bool:
        return self.load.transfer_async(job_id, (source, target))

    def submit_store(self, job_id: int, source: Blocks, target: Blocks) -> bool:
        return self.store.transfer_async(job_id, (source, target))

    def get_finished(self) -> list[Any]:
        return self.load.get_finished() + self.store.get_finished()


def test_a_worker_of_both_directions_is_damaged_alike() -> None:
    machine = Machine("stale")
    worker = Worker(machine)
    machine.damage.wrap_worker(worker)
    machine.engine[5] = 50
    assert worker.submit_store(1, Blocks(5), Blocks(0))
    assert worker.submit_load(2, Blocks(0, 1), Blocks(2, 3), expedited=False)
    assert len(worker.get_finished()) == 2
    assert [int(machine.engine[row, 0]) for row in (2, 3)] == [50, 77]
    machine = Machine("swap")
    worker = Worker(machine)
    machine.damage.wrap_worker(worker)
    for job, slots in enumerate(([0, 1], [2, 3], [0, 1])):
        worker.submit_load(job, Blocks(*slots), Blocks(0, 1), expedited=False)
    assert int(machine.engine[1, 0]) == 4
    worker.submit_store(9, Blocks(5), Blocks(3))
    worker.submit_load(10, Blocks(0, 1), Blocks(0, 1), expedited=False)
    assert int(machine.engine[1, 0]) == 2


def test_settings_are_read_from_either_configuration() -> None:
    from types import SimpleNamespace

    from gates.damage import extra_config

    new = SimpleNamespace(extra_config={"a": 1})
    transfer = SimpleNamespace(kv_connector_extra_config={"a": 2})
    assert extra_config(new) == {"a": 1}
    assert extra_config(SimpleNamespace(kv_transfer_config=transfer)) == {"a": 2}
