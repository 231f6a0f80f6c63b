"""Finds a matrix's model: two that need no hub, a folder that was given, or a name on the hub."""

from collections.abc import Callable
from pathlib import Path

from bench.errors import UsageProblem
from bench.matrix.sending import Decode
from bench.matrix.workloads.work import Encode
from bench.serving.model import check_model_folder, prepare_model
from bench.serving.tiny_model import prepare_tiny_model

TINY, SMOLLM2 = "tiny-random", "smollm2-135m"


def find_model(source: str, given: Path | None, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the model's folder; UsageProblem where it is not at hand."""
    if given is not None:
        return check_model_folder(given)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"--cache: cannot create {cache}: {error.strerror}") from None
    if source == SMOLLM2:
        return prepare_model(cache, say)
    if source == TINY:
        return prepare_tiny_model(cache)
    return from_hub(source)


def from_hub(source: str) -> Path:
    """Return the folder of a model on the hub, downloaded first where that is allowed."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source))
    except Exception as error:  # the hub's client raises a family of its own, and its network's
        reason = " ".join(str(error).split())[:200]
        raise UsageProblem(
            f"model {source} is not at hand ({reason}); give its folder with --model"
        ) from None


def load_tokenizer(model: Path) -> tuple[Encode, Decode]:
    """Return the model's tokenizer as two functions; no token is added, special ones are kept."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return (
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
    )
