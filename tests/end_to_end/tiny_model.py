"""A tiny random Llama, made by code: loads in a second, and needs no download.

``make`` writes the model alone, ``make_tokenizer`` a tokenizer of one word per token id beside it,
for servers that do not start without one.
"""

import json
from pathlib import Path

VOCABULARY = 256


def make(folder: Path, seed: int = 0) -> Path:
    """Write the model to ``folder``, float32, the same bytes for the same seed; return the folder.

    Wide initial weights keep greedy decoding sensitive to its context, so that a wrong block of
    the KV cache changes the tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer to the model's ``folder``: token ``n`` is the word ``wn``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
