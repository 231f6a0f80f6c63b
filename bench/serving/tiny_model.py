"""A tiny random Llama with a byte-level tokenizer, made by code: no download, loads in seconds.

Its weights are wide, so that greedy answers depend on every block of the context, and so do the
logprobs. It knows nothing: it finds no passkey, and a profile that uses it must not ask for any.
"""

import json
import shutil
import tempfile
from pathlib import Path

_VERSION = 1
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONTEXT = 2048


def prepare_tiny_model(cache: Path) -> Path:
    """Return the model's folder in `cache`, writing it first if needed; the same bytes always."""
    target = cache / f"tiny-random-{_VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="tiny-random.", dir=cache))
    try:
        _write_tokenizer(work)
        _write_weights(work)
        if not target.is_dir():
            work.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[0],
        "model_max_length": _CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _write_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256 + len(_SPECIAL),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=_CONTEXT,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=256,
            eos_token_id=256,
        )
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
