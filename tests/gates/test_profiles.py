"""Profiles: each one loads, fits its device and proves something; a wrong one is one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UsageProblem
from gates import __main__ as program
from gates.arms import ARMS, NEGATIVES, find_arm, server_config
from gates.profiles import FOLDER, Profile, load_profile, profile_names
from gates.recorder import Bench
from gates.run import arms_of, plan_lines

GPU = ("ada-16gb", "gpu-small", "hopper-80gb", "turing-6gb")
GIB = 2**30


def encode(text: str) -> list[int]:
    """A stand-in with fewer tokens than bytes, as a real tokenizer has."""
    return [ord(text[at]) for at in range(0, len(text), 3)]


def prepare(profile: Profile) -> Bench:
    return Bench.prepare(profile, encode, Path("model"))


def test_the_profiles_there_are() -> None:
    assert profile_names() == sorted([*GPU, "cpu", "tiny"])


@pytest.mark.parametrize("name", [*GPU, "cpu", "tiny"])
def test_sizes(name: str) -> None:
    bench = prepare(load_profile(name))
    sizes, rules = bench.sizes, bench.profile.rules
    assert sizes.overcommit >= 2
    assert sizes.tier_blocks < sizes.unique_blocks < sizes.baseline_blocks
    assert sizes.longest + 16 <= bench.profile.pools.max_model_len
    assert rules.min_restored_tokens * bench.profile.model.kv_bytes_per_token >= (
        rules.min_restored_bytes
    )
    assert rules.min_restored_tokens > 0.05 * sizes.reusable_tokens
    if name != "tiny":
        assert rules.min_probes >= 70
        assert rules.min_passkeys >= 10
        assert bench.profile.why.strip()


@pytest.mark.parametrize("name", GPU)
def test_gpu_profiles_fit_their_memory(name: str) -> None:
    bench = prepare(load_profile(name))
    pools, model = bench.profile.pools, bench.profile.model
    pool_gib = bench.sizes.baseline_blocks * bench.sizes.block_bytes / GIB
    total = model.weights_gib + pool_gib + pools.headroom_gib
    assert total <= pools.memory_gib * pools.usable_share
    with pytest.raises(UsageProblem, match="the baseline's pool takes"):
        prepare(replace(bench.profile, pools=replace(pools, memory_gib=model.weights_gib)))


def test_only_exact_where_the_device_repeats() -> None:
    exact = {name for name in profile_names() if load_profile(name).rules.exact}
    assert exact == {"cpu", "tiny"}
    assert all(load_profile(name).model.dtype == "float32" for name in exact)


@pytest.mark.parametrize("name", [*GPU, "cpu", "tiny"])
def test_arms_run_in_order_with_every_negative_control(name: str) -> None:
    arms = [arm.name for arm in arms_of(load_profile(name))]
    assert arms[:3] == ["baseline", "evoke", "control"]
    assert arms[-3:] == ["flip", "swap", "stale"]


def test_what_each_arm_is_served_with() -> None:
    bench = prepare(load_profile("cpu"))

    def config(name: str) -> tuple[int, Any]:
        made = server_config(find_arm(name), bench.profile, bench.sizes, Path("model"))
        transfer = made.kv_transfer
        return made.gpu_blocks, transfer and transfer["kv_connector_extra_config"]

    assert config("baseline") == (bench.sizes.baseline_blocks, None)
    assert config("control") == (33, None)
    tier = {"cpu_bytes_to_use": bench.sizes.tier_bytes}
    names = ("spec_name", "spec_module_path")
    stock = dict(zip(names, ("HostOffloadingSpec", "evoke_vllm.host"), strict=True))
    evoke = dict(zip(names, ("EvokeOffloadingSpec", "evoke_vllm.spec"), strict=True))
    damaged = dict(zip(names, ("DamagedSpec", "gates.damage"), strict=True))
    assert config("lru") == (33, {**stock, **tier})
    assert config("evoke") == (33, {**evoke, **tier})
    assert config("evoke-scored") == (33, {**evoke, **tier, "evoke": {"policy": "scored"}})
    for kind in NEGATIVES:
        hurt = {"kind": kind, "value_bytes": 4}
        assert config(kind) == (33, {**damaged, **tier, "gate_damage": hurt})
    assert [arm.name for arm in ARMS.values() if arm.judged] == ["evoke", "evoke-scored"]


def test_a_setting_in_the_environment_does_not_reach_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "lru")
    bench = prepare(load_profile("tiny"))
    config = server_config(find_arm("evoke"), bench.profile, bench.sizes, Path("model"))
    assert "EVOKE_POLICY" not in config.process_environment()


@pytest.mark.parametrize("name", sorted({*GPU, "tiny"} - {"gpu-small"}))
def test_dry_run_starts_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    args = ["run", "--profile", name, "--dry-run", "--cache", str(tmp_path)]
    assert program.main(args) == 0
    shown = capsys.readouterr().out
    profile = load_profile(name)
    assert profile.title in shown
    assert f"--num-gpu-blocks-override {profile.pools.pool_blocks} " in shown
    for arm in arms_of(profile):
        assert f"\n{arm.name}: vllm serve {profile.model.source} " in shown
    assert ("--gpu-memory-utilization" in shown) == (profile.pools.device == "cuda")


def test_plan_names_no_folder_of_this_machine() -> None:
    lines = "\n".join(plan_lines(prepare(load_profile("cpu"))))
    assert "/" not in lines.replace("nox -s", "")


def edited(tmp_path: Path, old: str, new: str) -> str:
    text = (FOLDER / "cpu.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sessions = 12", "sesions = 12", "unknown key workload.sesions; did you mean sessions?"),
        ("sessions = 12", "", "workload.sessions is missing"),
        ("sessions = 12", "sessions = true", "workload.sessions must be of type int, not True"),
        ("sessions = 12", 'sessions = "12"', "workload.sessions must be of type int, not '12'"),
        ("sessions = 12", "sessions = 0", "workload.sessions must be above 0, not 0"),
        ('dtype = "float32"', 'dtype = "int3"', "model.dtype must be one of float32, float16"),
        ('device = "cpu"', 'device = "tpu"', "pools.device must be one of cpu, cuda"),
        ('device = "cpu"', 'device = "cuda"', "pools.memory_gib and model.weights_gib are needed"),
        ('arms = ["evoke-scored", "lru"]', "arms = [1]", "arms must be a list of texts"),
        ('arms = ["evoke-scored", "lru"]', 'arms = ["mru"]', "no arm 'mru'; there are baseline"),
        ("[rules]", "[rules", "mine.toml"),
        ("min_restored_tokens = 4000", "min_restored_tokens = 0", "must be above 0"),
    ],
)
def test_a_wrong_profile_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UsageProblem) as error:
        load_profile(edited(tmp_path, old, new))
    assert message in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pool_blocks = 33", "pool_blocks = 90", "overcommit a pool of 90 only 1"),
        ("pool_blocks = 33", "pool_blocks = 12", "cannot hold one request of 512 tokens"),
        ("max_model_len = 512", "max_model_len = 400", "pools.max_model_len allows 400"),
        ("min_probes = 70", "min_probes = 700", "84 probes and 12 passkeys are asked"),
        ("min_restored_tokens = 4000", "min_restored_tokens = 99999", "tokens ever come back"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    profile = load_profile(edited(tmp_path, old, new))
    with pytest.raises(UsageProblem) as error:
        prepare(profile)
    assert message in error.value.message


def test_no_such_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["run", "--profile", "cpus"]) == 2
    assert capsys.readouterr().err == "Error: no profile 'cpus'; did you mean cpu?\n"
    assert program.main(["record", "--profile", "cpu", "--arm", "x", "--out", "y"]) == 2
    assert "no arm 'x'; there are baseline, evoke" in capsys.readouterr().err
