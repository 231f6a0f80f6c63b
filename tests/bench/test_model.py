"""The converted model folder: complete or not used, and true to the GGUF it came from."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.serving import model as model_module
from bench.serving.model import MARKER, check_model_folder, prepare_model

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
load_file = pytest.importorskip("safetensors.numpy").load_file
Tokenizer = pytest.importorskip("tokenizers").Tokenizer

HEADS, KV_HEADS, HIDDEN, FEED_FORWARD = 2, 1, 32, 32
TOKENS = ["<unk>", "<bos>", "<eos>", "a", "b", "1", "2", "Ġ", "ab", "12"]
TENSORS = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FEED_FORWARD, HIDDEN),
    "ffn_up": (FEED_FORWARD, HIDDEN),
    "ffn_down": (HIDDEN, FEED_FORWARD),
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF file in place of the installed distribution's."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    values = np.random.default_rng(0)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in TENSORS.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, values.random(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(model_module, "_source_file", lambda: path)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def test_converted_once(source: Path, cache: Path) -> None:
    said: list[str] = []
    folder = prepare_model(cache, said.append)
    assert check_model_folder(folder) == folder
    assert prepare_model(cache, said.append) == folder
    assert len(said) == 1
    assert list(cache.iterdir()) == [folder]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("damage", ["no marker", "older marker"])
def test_half_written_or_older_folder_is_replaced(tmp_path: Path, damage: str) -> None:
    folder = prepare_model(tmp_path)
    marker = json.loads((folder / MARKER).read_text())
    (folder / "stale").touch()
    if damage == "no marker":
        (folder / MARKER).unlink()
    else:
        (folder / MARKER).write_text(json.dumps({**marker, "converter": 0}))
    assert prepare_model(tmp_path) == folder
    assert json.loads((folder / MARKER).read_text()) == marker
    assert not (folder / "stale").exists()


@pytest.mark.usefixtures("source")
def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_module, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_model(cache)
    assert not any(cache.iterdir())


def test_weights_and_configuration(source: Path, cache: Path) -> None:
    folder = prepare_model(cache)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["hidden_size"], config["head_dim"]) == (HIDDEN, HIDDEN // HEADS)
    weights = load_file(folder / "model.safetensors")
    original = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source).tensors}
    assert len(weights) == len(original)
    np.testing.assert_allclose(
        weights["model.layers.0.mlp.down_proj.weight"],
        original["blk.0.ffn_down.weight"],
        atol=1e-3,
    )
    # GGUF holds a head's rotary pairs side by side, Hugging Face half a head apart.
    head = HIDDEN // HEADS
    paired = np.asarray(original["blk.0.attn_q.weight"]).reshape(HEADS, head, HIDDEN)
    halves = weights["model.layers.0.self_attn.q_proj.weight"].reshape(HEADS, head, HIDDEN)
    np.testing.assert_allclose(halves[:, : head // 2], paired[:, 0::2], atol=1e-3)
    np.testing.assert_allclose(halves[:, head // 2 :], paired[:, 1::2], atol=1e-3)


@pytest.mark.usefixtures("source")
def test_tokenizer(tmp_path: Path) -> None:
    folder = prepare_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<bos>ab").tokens == ["<bos>", "ab"]
    assert tokenizer.encode("12").tokens == ["1", "2"], "digits are split before merging"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<bos>", "<eos>")


def test_missing_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(BenchError, match="no-such-distribution, which is not installed"):
        prepare_model(tmp_path)
