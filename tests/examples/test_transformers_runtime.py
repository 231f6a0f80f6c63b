# SPDX-License-Identifier: Apache-2.0
"""The transformers runtime on a tiny random Llama: what moves in the cache, and when."""

import re
import zlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from examples.transformers_runtime import restore_cost, scene  # noqa: E402
from examples.transformers_runtime.cache import Block, BoundedCache, OverBudget  # noqa: E402
from examples.transformers_runtime.embedding import Embedder  # noqa: E402
from examples.transformers_runtime.runtime import SYSTEM, TRUNCATION, Runtime  # noqa: E402

VOCABULARY = 512
SPECIAL = ("<|im_end|>", "<|im_start|>")


class Words:
    """A tokenizer for tests: a word is a token, its number a checksum."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.added_tokens_decoder = dict(enumerate(SPECIAL))
        self._words = dict(enumerate(SPECIAL))

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        ids = []
        for word in re.findall(r"<\|im_end\|>|<\|im_start\|>|[\w']+|\S", text):
            token = (
                SPECIAL.index(word)
                if word in SPECIAL
                else 2 + zlib.crc32(word.encode()) % (VOCABULARY - 2)
            )
            self._words[token] = word
            ids.append(token)
        return type("Encoding", (), {"input_ids": ids})

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        kept = [token for token in tokens if not (skip_special_tokens and token < 2)]
        return " ".join(self._words.get(token, f"[{token}]") for token in kept)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval().float()


def tokens_of(seed: int, count: int) -> Any:
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def read(model: Any, cache: BoundedCache, ids: Any, *blocks: Block) -> Any:
    """Run the model over ``ids`` on top of the cache; return the logits."""
    cache.expect(ids.shape[1])
    logits = model(input_ids=ids, cache=cache.dynamic, use_cache=True).logits
    cache.name(blocks or [Block(b"%d" % cache.tokens, ids.shape[1])])
    return logits


@torch.inference_mode()
def from_scratch(model: Any, ids: Any, first: int) -> Any:
    """The cache layers of ``ids`` computed alone, at positions ``first``, ``first + 1``, ..."""
    dynamic = transformers.DynamicCache()
    at = torch.arange(first, first + ids.shape[1])[None]
    model(input_ids=ids, cache=dynamic, position_ids=at, use_cache=True)
    return dynamic.layers


@pytest.mark.parametrize("before", [0, 5, 600])
def test_a_restored_block_is_what_it_would_be_if_computed_there(model: Any, before: int) -> None:
    """Two blocks leave and land behind others: keys as from scratch at the new positions."""
    cache = BoundedCache(model)
    ids = tokens_of(1, 20)
    read(model, cache, ids, Block(b"a", 12), Block(b"b", 8))
    stored = cache.evict([b"a", b"b"])
    assert [each.block.key for each in stored] == [b"a", b"b"]
    assert [each.position for each in stored] == [0, 12]
    assert cache.tokens == 0
    if before:
        read(model, cache, tokens_of(2, before))
    cache.restore(stored)
    assert cache.tokens == before + 20
    for found, wanted in zip(cache.dynamic.layers, from_scratch(model, ids, before), strict=True):
        size = wanted.keys.abs().max()
        tolerance = 1e-4 * size  # angles of 620 rad in float32, in the model's own attention too
        assert (found.keys[:, :, before:] - wanted.keys).abs().max() < tolerance
        assert (found.values[:, :, before:] - wanted.values).abs().max() < tolerance
    if before:  # and being there matters: the keys are not those of positions 0 to 19
        stale = torch.from_numpy(stored[0].keys[0])
        assert (cache.dynamic.layers[0].keys[0, :, before : before + 12] - stale).abs().max() > 0.1


def test_what_stands_behind_a_gap_moves_up(model: Any) -> None:
    """The last block is computed without the one that leaves, so that it can be compared."""
    cache = BoundedCache(model)
    read(model, cache, tokens_of(1, 10), Block(b"a", 10))
    [a] = cache.evict([b"a"])
    ids = tokens_of(2, 16)
    read(model, cache, ids, Block(b"b", 16))
    stored = cache.evict([b"b"])
    cache.restore([a])
    cache.restore(stored)  # a at 0, b at 10
    cache.evict([b"a"])  # b at 0 again
    assert cache.blocks == [Block(b"b", 16)]
    for found, wanted in zip(cache.dynamic.layers, from_scratch(model, ids, 0), strict=True):
        assert (found.keys - wanted.keys).abs().max() < 1e-5 * wanted.keys.abs().max()
        assert torch.equal(found.values, wanted.values)


def test_logits_after_a_block_left_and_came_back(model: Any) -> None:
    """The last block goes and returns to where it stood: the model goes on as if nothing was."""
    plain, bounded = BoundedCache(model), BoundedCache(model, budget=80)
    for cache in (plain, bounded):
        read(model, cache, tokens_of(1, 40), Block(b"a", 24), Block(b"b", 16))
    bounded.restore(bounded.evict([b"b"]))
    question = tokens_of(3, 6)
    wanted, found = read(model, plain, question), read(model, bounded, question)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert bounded.most == 46

    without = BoundedCache(model)
    read(model, without, tokens_of(1, 40), Block(b"a", 24), Block(b"b", 16))
    without.evict([b"b"])
    lost = read(model, without, question)
    assert torch.isfinite(lost).all()
    assert (lost - wanted).abs().max() > 0.1  # what is missing is missed


def test_the_cache_refuses_what_its_owner_must_not_do(model: Any) -> None:
    cache = BoundedCache(model, budget=32)
    read(model, cache, tokens_of(1, 30), Block(b"a", 30))
    with pytest.raises(OverBudget, match="30 \\+ 3 tokens, the budget is 32"):
        read(model, cache, tokens_of(2, 3))
    stored = cache.evict([b"a"])
    read(model, cache, tokens_of(2, 3), Block(b"c", 3))
    with pytest.raises(OverBudget):
        cache.restore(stored)
    with pytest.raises(ValueError, match="make up 0 tokens"):
        cache.name([Block(b"d", 1)])
    with torch.inference_mode():
        model(input_ids=tokens_of(3, 2), cache=cache.dynamic, use_cache=True)
    with pytest.raises(ValueError, match="2 tokens at the end"):
        cache.restore(stored)
    assert cache.evict([b"unknown"]) == []
    cache.restore([])


# --- the runtime ---

TALK = [
    ("the code of the blue locker is 87435", "noted the blue locker"),
    *((f"topic{n} " * 5, " ".join(f"word{n}x{i}" for i in range(30))) for n in range(8)),
]


def runtime(model: Any, **settings: Any) -> Runtime:
    return Runtime(model, Words(), **{"budget": 160, **settings})


def test_an_evicted_fact_comes_back_when_it_is_asked_for(model: Any) -> None:
    talk = runtime(model)
    for user, reply in TALK:
        said = talk.say(user, reply)
        assert said.recalled == said.moved == []
        assert said.tokens <= said.most <= 160
    assert not talk.resident("87435")
    said = talk.say("what is the code of the blue locker ?")
    assert talk.resident("87435")
    assert any("87435" in text for text in said.recalled)
    assert said.recall_s > 0
    assert said.tokens <= said.most <= 160
    talk.say(*TALK[1])
    again = talk.say("what is the code of the blue locker ?")
    assert not any("87435" in text for text in again.recalled)  # it is there, and moves
    assert any("87435" in text for text in again.moved)
    assert any("87435" in talk.text(block.key) for block in talk.cache.blocks[-10:])
    assert again.tokens <= again.most <= 160


@pytest.mark.parametrize("settings", [{"recover": False}, {"config": TRUNCATION, "recover": False}])
def test_without_recovery_it_is_lost(model: Any, settings: dict[str, Any]) -> None:
    talk = runtime(model, **settings)
    for user, reply in TALK:
        talk.say(user, reply)
    assert talk.say("what is the code of the blue locker ?").recalled == []
    assert not talk.resident("87435")
    assert talk.resident("SmolLM")  # the head of the conversation is pinned


def test_the_budget_holds_in_every_run_of_the_model(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        lengths.append(kwargs["cache"].get_seq_length())
        return out

    monkeypatch.setattr(model, "forward", watched)
    talk = runtime(model, budget=128)
    for n in range(12):
        user, reply = TALK[n % len(TALK)]
        said = talk.say(user, reply if n % 3 else None)
        assert said.tokens == sum(block.tokens for block in talk.cache.blocks)
        assert not set(talk.store) & {block.key for block in talk.cache.blocks}
    assert max(lengths) <= 128
    assert max(lengths) == said.most
    assert len(talk.store) > 0


def test_unbounded_keeps_everything_and_answers_like_the_model_alone(model: Any) -> None:
    talk = runtime(model, budget=None, recover=False)
    for user, reply in TALK:
        assert talk.say(user, reply).evicted == []
    said = talk.say("and now ?")
    words = Words()
    text = "".join(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
        for user, reply in TALK
    )
    head = f"<|im_start|>system\n{SYSTEM}"
    tail = "<|im_start|>user\nand now ?<|im_end|>\n<|im_start|>assistant\n"
    ids = words(f"{head}<|im_end|>\n{text}{tail}", add_special_tokens=False).input_ids
    with torch.inference_mode():
        for _ in range(24):
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token == 0:
                break
            ids.append(token)
    wanted = ids[len(ids) - len(said.reply.split()) :]
    assert said.reply == words.decode(wanted, skip_special_tokens=True)


def test_the_same_conversation_goes_the_same_way(model: Any) -> None:
    def play() -> list[Any]:
        talk = runtime(model)
        said = [talk.say(user, reply) for user, reply in TALK]
        said.append(talk.say("what is the code of the blue locker ?"))
        return [(each.reply, each.tokens, each.evicted, each.recalled) for each in said]

    assert play() == play()


def test_embeddings_weigh_rare_words_and_no_control_tokens() -> None:
    table = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)
    embed = Embedder(table, frozenset([0, 1]))
    assert embed.dim == 8
    assert not embed([0, 1, 0]).any()
    np.testing.assert_allclose(embed([1, 500]), embed([500]))
    np.testing.assert_allclose(embed([500, 7]), embed([7]) + embed([500]), rtol=1e-4, atol=1e-7)
    common, rare = (np.linalg.norm(embed([t])) / np.linalg.norm(table[t]) for t in (2, 900))
    assert rare > 10 * common


def test_the_scene_tells_its_fact_at_the_first_turn_only() -> None:
    seen = set()
    for seed in range(scene.SEEDS):
        talk = scene.conversation(seed)
        assert talk == scene.conversation(seed)
        assert len(talk.turns) == 14
        assert talk.code in talk.turns[0].user
        later = " ".join(f"{turn.user} {turn.reply}" for turn in talk.turns[1:])
        assert talk.code not in later
        assert len(re.findall(r"\d", later)) == 0
        assert talk.turns[-1].reply is None
        seen.add(talk.code)
    assert len(seen) == scene.SEEDS


def test_costs_are_measured_for_each_length(model: Any) -> None:
    found = restore_cost.measure(model, [4, 8], repeats=2, before=16)
    assert [tokens for tokens, _, _ in found] == [4, 8]
    assert all(restore > 0 and prefill > 0 for _, restore, prefill in found)
