"""`python -m gates`: one line for every error, no traceback, and no server left behind.

Exit codes: 0 the gate passes, 1 it fails, is broken or could not be run, 2 for what cannot be
right (an option, a profile, a path), 130 when interrupted.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from bench.entry import run
from bench.errors import UsageProblem
from bench.progress import Reporter, make_console
from bench.serving.model import check_model_folder, prepare_model
from bench.serving.tiny_model import prepare_tiny_model
from gates import PUBLISHED, ROOT
from gates.arms import find_arm
from gates.compare import PASS, make_verdict, render
from gates.faults.checks import FAULTS
from gates.faults.report import report_name, run_faults
from gates.profiles import SMOLLM2, TINY, Profile, load_profile, profile_names
from gates.recorder import Bench, record
from gates.recording import SUFFIX, Recording
from gates.run import VERDICT, Record, plan_lines, rederive, run_gate, summary
from gates.workload import Encode

PACKAGES = ("vllm", "lmcache")
_PATH = click.Path(path_type=Path)
_profile = click.option(
    "--profile",
    "profile_name",
    default="cpu",
    show_default=True,
    help=f"{', '.join(profile_names())}, or a TOML file.",
)
_model = click.option("--model", type=_PATH, help="A Hugging Face model folder to use instead.")
_cache = click.option(
    "--cache", type=_PATH, default=ROOT / ".cache", help="Where made models are kept."
)
_package = click.option(
    "--package",
    type=click.Choice(PACKAGES),
    default=PACKAGES[0],
    show_default=True,
    help="evoke-vllm in a server of vLLM's, or evoke-lmcache in LMCache's engine (on a CPU).",
)


@click.group()
def cli() -> None:
    """Correctness gates of EVOKE on real servers."""


@cli.command("run")
@_package
@_profile
@_model
@_cache
@click.option("--results", type=_PATH, help="Where recordings go; default: results/gates/PROFILE.")
@click.option("--publish", is_flag=True, help="Copy recordings and verdict to gates/published.")
@click.option("--dry-run", is_flag=True, help="Show sizes and command lines; start nothing.")
def run_command(
    package: str,
    profile_name: str,
    model: Path | None,
    cache: Path,
    results: Path | None,
    publish: bool,
    dry_run: bool,
) -> int:
    """Record every arm of a profile, compare, and give a verdict."""
    profile = _profile_for(package, profile_name)
    reporter = Reporter(make_console())
    bench = _prepare(profile, model, cache, reporter, dry_run=dry_run)
    if dry_run:
        for line in plan_lines(bench, servers=package == PACKAGES[0]):
            reporter.say(line)
        return 0
    folder = results or ROOT / "results" / "gates" / profile.name
    reporter.say(f"profile {profile.name}: {profile.title}")
    for line in bench.sizes.lines():
        reporter.say(line)
    verdict = run_gate(bench, folder, reporter, _recorder(package))
    if publish:
        _publish(folder, PUBLISHED / profile.name)
    for line in summary(verdict):
        reporter.say(line)
    reporter.say(f"recordings and verdict: {PUBLISHED / profile.name if publish else folder}")
    return 0 if verdict["verdict"] == PASS else 1


@cli.command("record")
@_package
@_profile
@click.option("--arm", "arm_name", required=True, help="An arm or a negative control.")
@click.option("--out", type=_PATH, required=True, help="The recording's file.")
@_model
@_cache
def record_command(
    package: str, profile_name: str, arm_name: str, out: Path, model: Path | None, cache: Path
) -> None:
    """Record one arm of a profile."""
    arm = find_arm(arm_name)
    reporter = Reporter(make_console())
    bench = _prepare(_profile_for(package, profile_name), model, cache, reporter, dry_run=False)
    log = out.with_name(out.name.removesuffix(SUFFIX) + ".log")
    recording = _recorder(package)(arm, bench, log, reporter)
    recording.save(out)
    reporter.say(f"recording: {out}")


@cli.command("compare")
@click.option("--baseline", type=_PATH, required=True, help="The arm that never evicts.")
@click.option("--candidate", type=_PATH, required=True, help="The arm that is judged.")
@click.option("--control", type=_PATH, required=True, help="The arm that recomputes.")
@click.option("--negative", "negatives", type=_PATH, multiple=True, help="A damaged arm.")
@click.option("--other", "others", type=_PATH, multiple=True, help="An arm to compare as well.")
@click.option("--out", type=_PATH, required=True, help="The verdict's file.")
def compare_command(
    baseline: Path,
    candidate: Path,
    control: Path,
    negatives: tuple[Path, ...],
    others: tuple[Path, ...],
    out: Path,
) -> int:
    """Compare recordings and give a verdict; needs no engine."""
    verdict = make_verdict(
        *(Recording.load(path) for path in (baseline, candidate, control)),
        negatives={(each := Recording.load(path)).arm: each for path in negatives},
        others={(each := Recording.load(path)).arm: each for path in others},
    )
    try:
        out.write_text(render(verdict))
    except OSError as error:
        raise UsageProblem(f"--out: cannot write {out}: {error.strerror}") from None
    for line in summary(verdict):
        click.echo(line)
    return 0 if verdict["verdict"] == PASS else 1


@cli.command("faults")
@click.option("--only", multiple=True, help=f"One of {', '.join(FAULTS)}; may be repeated.")
@click.option(
    "--minutes",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    help="How long the 64 clients ask; 10 for the full gate.",
)
@_cache
@click.option("--results", type=_PATH, default=ROOT / "results" / "gates" / "faults")
@click.option("--publish", is_flag=True, help="Copy the report to gates/published/faults.")
def faults_command(
    only: tuple[str, ...], minutes: float, cache: Path, results: Path, publish: bool
) -> int:
    """Kill, fill, abort, reset and crowd a server, on the tiny model."""
    for name in only:
        if name not in FAULTS:
            raise UsageProblem(f"--only: no fault {name!r}; there are {', '.join(FAULTS)}")
    faults = [fault for name, fault in FAULTS.items() if not only or name in only]
    reporter = Reporter(make_console())
    report = run_faults(faults, prepare_tiny_model(cache), results, minutes, reporter)
    if publish:
        target = PUBLISHED / "faults"
        target.mkdir(parents=True, exist_ok=True)
        (target / report_name()).write_bytes((results / report_name()).read_bytes())
    reporter.say(f"fault gates: {report['verdict'].upper()}; report: {results / report_name()}")
    return 0 if report["verdict"] == PASS else 1


@cli.command("rederive")
@click.argument("folder", type=_PATH)
def rederive_command(folder: Path) -> int:
    """Derive the verdict in a folder from its recordings again; needs no engine."""
    verdict = rederive(folder)
    for line in summary(verdict):
        click.echo(line)
    return 0 if verdict["verdict"] == PASS else 1


def load_encoder(model: Path) -> Encode:
    """Return the model's tokenizer as a function from text to token ids, none added."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _profile_for(package: str, name: str) -> Profile:
    """Return a profile; for LMCache's engine under a name of its own."""
    profile = load_profile(name)
    if package == PACKAGES[0]:
        return profile
    if profile.pools.device != "cpu" or profile.model.dtype != "float32":
        raise UsageProblem(f"--package {package} runs float32 on a CPU: not profile {name}")
    return replace(profile, name=f"{package}-{profile.name}")


def _recorder(package: str) -> Record:
    """Return what records an arm; each package needs an environment of its own."""
    if package == PACKAGES[0]:
        return record
    try:
        from gates.lmcache.recorder import record as record_lmcache
    except ModuleNotFoundError as error:
        raise UsageProblem(f"--package {package}: {error.name} is not installed here") from None
    return record_lmcache


def _prepare(
    profile: Profile, model: Path | None, cache: Path, reporter: Reporter, *, dry_run: bool
) -> Bench:
    """Find the model and make the probes with its tokenizer."""
    source = profile.model.source
    if model is not None:
        check_model_folder(model)
    else:
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageProblem(f"--cache: cannot create {cache}: {error.strerror}") from None
        if source == SMOLLM2:
            model = prepare_model(cache, reporter.say)
        elif source == TINY:
            model = prepare_tiny_model(cache)
        elif dry_run:
            model = prepare_tiny_model(cache)
            reporter.say(f"sizes with a stand-in for the tokenizer of {source}: turns are cut to")
            reporter.say("exact numbers of tokens, so blocks and bytes are the same with any")
        else:
            model = _from_hub(source)
    return Bench.prepare(profile, load_encoder(model), model)


def _from_hub(source: str) -> Path:
    """Return the folder of a model on the hub, downloaded first where that is allowed."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source))
    except Exception as error:  # the hub's client raises a family of its own, and its network's
        reason = " ".join(str(error).split())[:200]
        raise UsageProblem(
            f"model {source} is not at hand ({reason}); give its folder with --model"
        ) from None


def _publish(source: Path, target: Path) -> None:
    """Copy recordings and verdict; nothing older stays beside them."""
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob(f"*{SUFFIX}"), target / VERDICT):
        old.unlink(missing_ok=True)
    for path in (*source.glob(f"*{SUFFIX}"), source / VERDICT):
        (target / path.name).write_bytes(path.read_bytes())


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(cli, "gates", args)


if __name__ == "__main__":
    sys.exit(main())
