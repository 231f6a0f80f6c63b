"""EVOKE's spec with a worker that counts what it moves and, where told to, damages restores.

``BYTES`` counts by direction. With ``CORRUPT_VARIABLE`` set in the environment the highest exponent
bit of one value in every restored block is flipped: proof that the engine test can fail.
"""

import os

from evoke_vllm.host import HostTransferHandler
from evoke_vllm.spec import EvokeOffloadingSpec

BYTES = {"stored": 0, "restored": 0}
CORRUPT_VARIABLE = "TEST_CORRUPT_RESTORES"  # test_engine.py sets it


class ProbedHandler(HostTransferHandler):
    def _copy(self, ref, engine_rows, tier_rows):
        super()._copy(ref, engine_rows, tier_rows)
        if not self._store and os.environ.get(CORRUPT_VARIABLE):
            self._engine[ref.tensor_idx][engine_rows, 3] ^= 0x40

    def get_finished(self):
        finished = super().get_finished()
        for result in finished:
            BYTES["stored" if self._store else "restored"] += result.transfer_size
        return finished


class ProbedSpec(EvokeOffloadingSpec):
    def get_handlers(self, kv_caches):
        for source, target, handler in super().get_handlers(kv_caches):
            handler.__class__ = ProbedHandler
            yield source, target, handler
