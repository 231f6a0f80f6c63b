"""Where a request's tags stand in vLLM, and which of two that contradict each other counts.

A client's ``kv_transfer_params`` come first, its mapping ``evoke`` before flat keys. On vLLM 0.31+
an orchestrator may attach an envelope of hints (``kv_hints``); actions of the type ``evoke.tags``
carry the same mapping, and count where the client says nothing itself.

Guarantee: whatever stands there, nothing raises.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from evoke_core import RequestTags, TagProblem
from evoke_core.tags import FLAT_PREFIX, MAPPING_KEY

ACTION_TYPE = "evoke.tags"
"""The type of the actions, in an envelope of hints, whose payload are tags."""

MAX_ACTIONS = 64
"""Actions of one envelope that are looked at."""


def read_tags(context: Any, tokens_per_block: int) -> tuple[RequestTags, tuple[TagProblem, ...]]:
    """Return the tags of a request's context, and what was wrong with them."""
    params = context.kv_transfer_params
    envelope = getattr(context, "kv_hints", None)
    if envelope is not None and (hints := _from_envelope(envelope)):
        params = {**hints, **params} if isinstance(params, Mapping) else hints
    return RequestTags.from_transfer_params(params, tokens_per_block=tokens_per_block)


def _from_envelope(envelope: Any) -> dict[str, Any]:
    """Return an envelope's tags under flat keys, which any tag of the client overrules."""
    found: dict[str, Any] = {}
    try:
        for payload in _payloads(envelope):
            found.update(
                (FLAT_PREFIX + tag, value) for tag, value in payload.items() if isinstance(tag, str)
            )
    except Exception:  # a stranger's object: whatever it does, it must not stop the engine
        return {}
    return found


def _payloads(envelope: Any) -> Iterable[Mapping[Any, Any]]:
    if isinstance(envelope, Mapping):
        tags = envelope.get(MAPPING_KEY)
        if isinstance(tags, Mapping):
            yield tags
        actions = envelope.get("actions")
    else:
        actions = getattr(envelope, "actions", None)
    if isinstance(actions, (list, tuple)):
        for action in actions[:MAX_ACTIONS]:
            read = action.get if isinstance(action, Mapping) else vars_of(action)
            payload = read("payload")
            if read("action_type") == ACTION_TYPE and isinstance(payload, Mapping):
                yield payload


def vars_of(thing: Any) -> Any:
    """Return a reader of attributes that gives None for those that are missing."""
    return lambda name: getattr(thing, name, None)
