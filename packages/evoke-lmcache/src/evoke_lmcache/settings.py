"""The operator's settings, read from LMCache's ``extra_config``.

Keys, defaults and errors are evoke-vllm's. Weights for attention and coherence are refused, because
LMCache tells a cache policy nothing about either, and recordings, which evoke-vllm makes.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from evoke_core import ConfigError, EvokeConfig

EXTRA = "extra_config"
CONFIG_KEY = "evoke"
UNSUPPORTED = ("w_attention", "w_coherence")


def load_config(
    extra: Any,
    *,
    source: str = f"{EXTRA}['{CONFIG_KEY}']",
    say: Callable[[str], None] = lambda line: None,
    environ: Mapping[str, str] | None = None,
) -> EvokeConfig:
    """Read the settings under ``extra["evoke"]`` and in the environment, which wins.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """
    settings = extra.get(CONFIG_KEY) if isinstance(extra, Mapping) else None
    if isinstance(settings, Mapping) and settings.get("record_trace") is not None:
        raise ConfigError(
            f"record_trace = {settings['record_trace']!r} (from {source}) is not allowed; allowed: "
            "none, because only evoke-vllm makes recordings"
        )
    config = EvokeConfig.load(settings, source=source, say=say, environ=environ)
    variables = os.environ if environ is None else environ
    for name in UNSUPPORTED:
        if value := getattr(config, name):
            variable = f"EVOKE_{name.upper()}"
            origin = f"environment variable {variable}" if variable in variables else source
            raise ConfigError(
                f"{name} = {value!r} (from {origin}) is not allowed; allowed: 0, because LMCache "
                f"tells a cache policy nothing about {name.removeprefix('w_')}"
            )
    return config
