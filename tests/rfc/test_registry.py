# SPDX-License-Identifier: Apache-2.0
"""RFC 0004, in an LMCache with its patch: `nox -s "rfc(number='0004')"`."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("lmcache", reason="no LMCache here: run `nox -s rfc`")

from lmcache.v1.storage_backend import cache_policy
from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING, get_cache_policy
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy

if not hasattr(cache_policy, "register_cache_policy"):
    pytest.skip("this LMCache does not have the patch: run `nox -s rfc`", allow_module_level=True)

from lmcache.v1.storage_backend.cache_policy import (
    CachePolicyContext,
    register_cache_policy,
    registry,
)

from evoke_lmcache.plugin import PolicyFactory
from evoke_lmcache.policy import EvokeCachePolicy
from tests.lmcache.engine import engine

NOT_CALLABLE = 1


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", {})


def context(**extra: Any) -> Any:
    config: Any = SimpleNamespace(cache_policy="?", chunk_size=16, extra_config=extra)
    return CachePolicyContext(config, "LocalCPUBackend")


class Noted(LRUCachePolicy):
    """LMCache's LRU, that remembers for whom it was built."""

    built: ClassVar[list["Noted"]] = []

    def __init__(self, context: CachePolicyContext) -> None:
        super().__init__()
        self.context = context
        Noted.built.append(self)


def build_evoke(context: CachePolicyContext) -> EvokeCachePolicy:
    return PolicyFactory().configure(context.config, context.backend)


def test_a_registered_policy_is_built_for_its_backend() -> None:
    register_cache_policy("Noted", Noted)
    given = context(a=1)
    for name in ("noted", "NOTED"):
        policy = get_cache_policy(name, given)
        assert isinstance(policy, Noted)
        assert policy.context is given


def test_a_name_belongs_to_one_builder() -> None:
    register_cache_policy("Noted", Noted)
    register_cache_policy("NOTED", Noted)
    with pytest.raises(ValueError, match="NOTED is registered already"):
        register_cache_policy("noted", build_evoke)


@pytest.mark.parametrize("name", ["", "a.module:attribute"])
def test_what_is_no_name_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError, match="Not a name"):
        register_cache_policy(name, Noted)


def test_an_import_path_needs_no_registration() -> None:
    policy = get_cache_policy(f"{__name__}:Noted", context())
    assert isinstance(policy, Noted)


@pytest.mark.parametrize("path", ["no.such.module:Policy", f"{__name__}:Nothing"])
def test_a_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"Cache policy {path} cannot be imported"):
        get_cache_policy(path, context())


def test_what_cannot_be_called_is_no_policy() -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        get_cache_policy(f"{__name__}:NOT_CALLABLE", context())


def test_the_unknown_is_refused_with_everything_that_is_known() -> None:
    register_cache_policy("Noted", Noted)
    with pytest.raises(ValueError, match="Unknown cache policy: OTHER") as error:
        get_cache_policy("other", context())
    for name in (*POLICY_MAPPING, "NOTED"):
        assert name in str(error.value)


def test_built_in_policies_need_no_context_and_others_do() -> None:
    assert isinstance(get_cache_policy("lru"), LRUCachePolicy)
    register_cache_policy("Noted", Noted)
    with pytest.raises(ValueError, match="needs a context"):
        get_cache_policy("noted")


def test_the_mapping_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that writes into it goes on working, ours among it."""
    register_cache_policy("Noted", Noted)
    monkeypatch.setitem(POLICY_MAPPING, "NOTED", LRUCachePolicy)
    assert type(get_cache_policy("noted", context())) is LRUCachePolicy


def test_every_backend_says_who_it_is_and_what_it_was_told(tmp_path: Any) -> None:
    Noted.built.clear()
    told = {"mine": 7}
    register_cache_policy("Noted", Noted)
    place = f"file://{tmp_path}"
    with engine("Noted", 8, extra_config=told, local_disk=place, max_local_disk_size=0.001):
        pass
    assert {each.context.backend for each in Noted.built} == {"LocalCPUBackend", "LocalDiskBackend"}
    assert all(each.context.config.extra_config == told for each in Noted.built)


def test_evoke_by_import_path_alone() -> None:
    """Nothing is looked up under EVOKE's name, nor in the frame of the constructor that asks."""
    with engine(f"{__name__}:build_evoke", 8) as built:
        assert isinstance(built.cpu.cache_policy, EvokeCachePolicy)
        text = list(range(64))
        assert built.serve(text) == 0
        assert built.serve(text) == 64
