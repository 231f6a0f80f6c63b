"""EVOKE's spec with a worker that counts what it moves and, where told to, damages restores.

``BYTES`` counts by direction. With ``CORRUPT_VARIABLE`` set in the environment the highest exponent
bit of one value in every restored block is flipped: proof that the engine test can fail.
"""

import os

from evoke_vllm.host import HostCopies
from evoke_vllm.spec import EvokeOffloadingSpec

BYTES = {"stored": 0, "restored": 0}
CORRUPT_VARIABLE = "TEST_CORRUPT_RESTORES"  # test_engine.py sets it


class ProbedCopies(HostCopies):
    def copy(self, ref, engine_rows, slots, parts, *, store):
        super().copy(ref, engine_rows, slots, parts, store=store)
        if not store and os.environ.get(CORRUPT_VARIABLE):
            self.engine[ref.tensor_idx][engine_rows, 3] ^= 0x40

    def transfer(self, job_id, engine_spec, tier_spec, *, store):
        result = super().transfer(job_id, engine_spec, tier_spec, store=store)
        BYTES["stored" if store else "restored"] += result.transfer_size
        return result


class ProbedSpec(EvokeOffloadingSpec):
    copies_class = ProbedCopies
