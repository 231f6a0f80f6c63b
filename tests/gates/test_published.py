"""What is published derives from its recordings, passes, and was damaged to show it can fail."""

import pytest

from gates import PUBLISHED
from gates.arms import NEGATIVES
from gates.profiles import load_profile
from gates.recording import SUFFIX, Recording
from gates.run import rederive

FOLDERS = sorted(path for path in PUBLISHED.glob("*") if path.is_dir() and path.name != "faults")


@pytest.mark.parametrize("name", [folder.name for folder in FOLDERS])
def test_the_verdict_derives_from_the_recordings(name: str) -> None:
    verdict = rederive(PUBLISHED / name)
    assert verdict["verdict"] == "pass"
    assert verdict["vacuous"] is False
    assert verdict["counts"]["probes"] >= 70
    assert verdict["counts"]["passkeys_found"] >= 10
    assert {n: c["verdict"] for n, c in verdict["negative_controls"].items()} == dict.fromkeys(
        NEGATIVES, "fail"
    )


@pytest.mark.parametrize("name", [folder.name for folder in FOLDERS])
def test_it_was_recorded_under_the_profile_as_it_is(name: str) -> None:
    for path in (PUBLISHED / name).glob(f"*{SUFFIX}"):
        recording = Recording.load(path)
        assert recording.profile == name
        profile = load_profile(name.removeprefix("lmcache-"))
        assert recording.rules == profile.rules
        assert recording.workload["sessions"] == profile.workload.sessions


@pytest.mark.parametrize("name", ["cpu", "lmcache-cpu"])
def test_both_packages_are_published(name: str) -> None:
    assert name in [folder.name for folder in FOLDERS]
