"""What the operator set: vLLM's extra configuration and the environment, read and checked.

Guarantees: whatever cannot be honoured is a ``ConfigError`` of one line that says what, where from
and what is allowed, before anything is allocated.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from vllm.logger import init_logger

from evoke_core import ConfigError, EvokeConfig
from evoke_vllm import compat

logger = init_logger(__name__)

EXTRA = "kv_connector_extra_config"
CONFIG_KEY = "evoke"
SOURCE = f"{EXTRA}['{CONFIG_KEY}']"


def load_config(
    extra: Mapping[str, Any], window_groups: Collection[int], source: str = SOURCE
) -> EvokeConfig:
    """Read the settings from vLLM's extra configuration and the environment.

    The model's groups without full attention decide which policy is the default. ``source`` says
    in messages where the settings are from.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """
    config = EvokeConfig.load(
        extra.get(CONFIG_KEY),
        source=source,
        say=logger.info,
        default_policy=compat.default_policy(window_groups),
    )
    for name in ("w_attention", "w_coherence"):
        if value := getattr(config, name):
            variable = f"EVOKE_{name.upper()}"
            origin = f"environment variable {variable}" if variable in os.environ else source
            raise ConfigError(
                f"{name} = {value!r} (from {origin}) is not allowed; allowed: 0, because vLLM "
                f"tells an offloading manager nothing about {name.removeprefix('w_')}"
            )
    return config


def integer(extra: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    """A stock option that must be an integer of at least ``least``.

    Raises:
        ConfigError: it is something else.
    """
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} = {value!r} (from {EXTRA}) is not allowed; allowed: an integer of at least "
            f"{least}"
        )
    return value


def check_sizes(given: compat.Given) -> None:
    """Refuse sizes on which the stock spec would stop without saying why.

    Raises:
        ConfigError: one of them cannot be honoured.
    """
    budget = given.extra.get("cpu_bytes_to_use")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise ConfigError(
            f"cpu_bytes_to_use = {budget!r} (from {EXTRA}) is not allowed; allowed: a positive "
            "number of bytes"
        )
    block_size = given.extra.get("block_size")
    if block_size is None:
        return
    engine_sizes = set(given.engine_block_sizes)
    if (
        isinstance(block_size, bool)
        or not isinstance(block_size, int)
        or block_size < 1
        or len(engine_sizes) != 1
        or block_size % max(engine_sizes)
    ):
        raise ConfigError(
            f"block_size = {block_size!r} (from {EXTRA}) is not allowed; allowed: a multiple of "
            f"the engine's block size, {', '.join(map(str, sorted(engine_sizes)))} tokens, "
            "and only where all KV-cache groups share one"
        )


def check_room(spec: Any) -> None:
    """Refuse a budget that holds no block at all.

    Raises:
        ConfigError: it does not.
    """
    if compat.slots(spec) < 1:
        raise ConfigError(
            f"cpu_bytes_to_use = {spec.extra_config['cpu_bytes_to_use']!r} (from {EXTRA}) is not "
            f"allowed; allowed: at least one block, {compat.bytes_per_slot(spec)} bytes"
        )
