"""How large everything is: computed before a server starts, and shown by a dry run.

Contexts are cut to exact numbers of the model's own tokens, so sizes hold for the prompts that
are really sent. A plan that cannot prove anything (a pool not overcommitted) or cannot run (a
baseline that does not fit the device, a prompt longer than the model may see) is refused.
"""

from dataclasses import dataclass

from bench.errors import UsageProblem
from gates.profiles import Profile
from gates.workload import Probe, reusable_tokens, unique_blocks

_GIB = 2**30
_TAIL_BLOCKS = 2  # a part-filled block of the prompt, and one that the answer spills into
_SPARE_BLOCKS = 8  # the engine's own


@dataclass(frozen=True)
class Sizes:
    """Blocks and bytes of a profile's workload; `block_bytes` is one block of all layers."""

    probes: int
    longest: int
    prompt_tokens: int
    reusable_tokens: int
    unique_blocks: int
    pool_blocks: int
    baseline_blocks: int
    tier_blocks: int
    block_bytes: int

    @property
    def tier_bytes(self) -> int:
        """The tier's budget."""
        return self.tier_blocks * self.block_bytes

    @property
    def overcommit(self) -> float:
        """Distinct blocks over the small pool's."""
        return self.unique_blocks / self.pool_blocks

    def lines(self) -> list[str]:
        """Return what a dry run shows."""
        return [
            f"{self.probes} probes, {self.prompt_tokens:,} prompt tokens, the longest prompt "
            f"{self.longest}; {self.reusable_tokens:,} tokens come back in full blocks",
            f"{self.unique_blocks} distinct blocks of {self.block_bytes:,} bytes: "
            f"{self.overcommit:.1f} times the pool of {self.pool_blocks}",
            f"the baseline's pool: {self.baseline_blocks} blocks, "
            f"{self.baseline_blocks * self.block_bytes / _GIB:.2f} GiB",
            f"the tier: {self.tier_blocks} blocks, {self.tier_bytes / _GIB:.2f} GiB",
        ]


def measure(profile: Profile, probes: tuple[Probe, ...]) -> Sizes:
    """Return the sizes of these probes under `profile`; UsageProblem where they cannot work."""
    pools = profile.pools
    prompts = [probe.prompt for probe in probes]
    distinct = unique_blocks(prompts, pools.block_size)
    sizes = Sizes(
        probes=len(probes),
        longest=max(map(len, prompts)),
        prompt_tokens=sum(map(len, prompts)),
        reusable_tokens=sum(reusable_tokens(probes, pools.block_size)),
        unique_blocks=distinct,
        pool_blocks=pools.pool_blocks,
        baseline_blocks=distinct + _TAIL_BLOCKS * len(probes) + _SPARE_BLOCKS,
        tier_blocks=max(1, int(pools.tier_share * distinct)),
        block_bytes=profile.model.kv_bytes_per_token * pools.block_size,
    )
    _check(profile, probes, sizes)
    return sizes


def _check(profile: Profile, probes: tuple[Probe, ...], sizes: Sizes) -> None:
    pools, rules, name = profile.pools, profile.rules, profile.name
    needed = max(len(probe.prompt) + probe.answer_tokens for probe in probes)
    if needed > pools.max_model_len:
        raise UsageProblem(
            f"profile {name}: a prompt and its answer take {needed} tokens, "
            f"pools.max_model_len allows {pools.max_model_len}"
        )
    least_pool = -(-pools.max_model_len // pools.block_size) + 1
    if pools.pool_blocks < least_pool:
        raise UsageProblem(
            f"profile {name}: pools.pool_blocks = {pools.pool_blocks} cannot hold one request of "
            f"{pools.max_model_len} tokens; at least {least_pool}"
        )
    if sizes.overcommit < rules.min_overcommit:
        raise UsageProblem(
            f"profile {name}: {sizes.unique_blocks} distinct blocks overcommit a pool of "
            f"{pools.pool_blocks} only {sizes.overcommit:.1f} times, at least "
            f"{rules.min_overcommit:g} are needed"
        )
    passkeys = sum(probe.passkey is not None for probe in probes)
    if len(probes) < rules.min_probes or passkeys < rules.min_passkeys:
        raise UsageProblem(
            f"profile {name}: {len(probes)} probes and {passkeys} passkeys are asked; the rules "
            f"want {rules.min_probes} and {rules.min_passkeys}"
        )
    if rules.min_restored_tokens > sizes.reusable_tokens:
        raise UsageProblem(
            f"profile {name}: rules.min_restored_tokens = {rules.min_restored_tokens}, but only "
            f"{sizes.reusable_tokens} tokens ever come back"
        )
    if pools.device == "cuda":
        room = pools.memory_gib * pools.usable_share - profile.model.weights_gib
        room -= pools.headroom_gib
        takes = sizes.baseline_blocks * sizes.block_bytes / _GIB
        if takes > room:
            raise UsageProblem(
                f"profile {name}: the baseline's pool takes {takes:.1f} GiB, and beside weights "
                f"and headroom {room:.1f} GiB are free"
            )
