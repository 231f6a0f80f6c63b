"""A chat runtime on transformers whose cache is bounded; evoke-core decides what leaves it.

One conversation. Its turns are cut into blocks; a block may leave from anywhere, because what it
holds was computed with all that stood before it and stays true without. In evoke-core's words the
blocks form a window group: none needs another.

For each turn, in this order:

1. The user's words become an embedding. The task's focus follows it, and the blocks' coherence
   with the focus goes to the index.
2. Blocks of earlier turns that are near to that embedding are recalled, within a budget of their
   own: they land right before the turn, where a small model finds them. Evicted ones come back from
   the store; one that is still in the cache, but far ahead, is moved in the same way.
3. Room is made for them and for the turn: the index says which blocks go, to a store on the host.
4. The model reads the turn and, unless the reply is given, answers. Which blocks it attended to
   goes to the index.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen

from evoke_core import EvokeConfig, RequestTags, RetentionIndex, chain_keys
from evoke_core.recovery import RecoveryMemory
from evoke_core.signals import AttentionMass, TaskFocus, block_mass
from examples.transformers_runtime.cache import Block, BoundedCache, StoredBlock
from examples.transformers_runtime.embedding import Embedder

Array = npt.NDArray[Any]

BLOCK = 16
REPLY_TOKENS = 24
STORE_BLOCKS = 4096
# In the scene, nothing that an unrelated turn asks comes nearer to a block than 0.75, and no
# question about a fact stays farther from it than 0.9: see the README.
THRESHOLD = 0.8
RECALL_BLOCKS, RECALL_NEIGHBOURS, RECALL_TOKENS = 2, 2, 128
SAME_TOPIC = 0.6
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SIGNALS = EvokeConfig(
    policy="scored",
    w_recency=0.5,
    w_reuse=0.0,
    w_attention=0.25,
    w_coherence=0.25,
    recency_half_life=4,  # turns; "auto" is at least 16, more than the scene has
)
TRUNCATION = EvokeConfig(policy="lru")


@frozen
class Said:
    """What a turn came to.

    Attributes:
        reply: the model's words, or those given.
        tokens: tokens in the cache at its end.
        most: tokens that were in the cache at most, since the conversation began.
        evicted: texts of the blocks that left for it.
        recalled: texts of the blocks that came back from the store.
        moved: texts of the blocks that were in the cache and moved to its end.
        recall_s: seconds that recalling and moving took, the choice included.
    """

    reply: str
    tokens: int
    most: int
    evicted: list[str] = field(factory=list)
    recalled: list[str] = field(factory=list)
    moved: list[str] = field(factory=list)
    recall_s: float = 0.0


class Runtime:
    """A conversation with a model. See the module's docstring.

    Args:
        model, tokenizer: of transformers; the model in float32, attention "eager".
        budget: tokens that the cache may hold; None: all of them.
        config: what the index goes by: ``SIGNALS``, or ``TRUNCATION`` for the oldest first.
        recover: whether evicted blocks may come back.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        budget: int | None = None,
        config: EvokeConfig = SIGNALS,
        recover: bool = True,
    ) -> None:
        self.cache = BoundedCache(model, budget)
        self.store: dict[bytes, StoredBlock] = {}
        self._model = model
        self._tokenizer = tokenizer
        table = model.get_input_embeddings().weight.detach().numpy()
        self._embed = Embedder(table, frozenset(tokenizer.added_tokens_decoder))
        blocks = None if budget is None else budget // BLOCK
        self._index = RetentionIndex(config, window_groups=[0], capacity=blocks)
        self._attention = AttentionMass()
        self._focus = TaskFocus(snap_below=SAME_TOPIC)
        self._memory = RecoveryMemory(STORE_BLOCKS, self._embed.dim)
        self._listens = budget is not None and config.policy == "scored"
        self._recover = recover
        self._texts: dict[bytes, str] = {}
        self._embeddings: dict[bytes, Array] = {}
        self._last_key = b""
        self._turns = 0
        self._read_system()

    @torch.inference_mode()
    def say(self, user: str, reply: str | None = None) -> Said:
        """Take a turn. Without a ``reply`` the model answers, greedily."""
        self._turns += 1
        turn = f"turn {self._turns}"
        text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        tokens = self._encode(text if reply is None else f"{text}{reply}<|im_end|>\n")
        room = len(tokens) + (REPLY_TOKENS if reply is None else 0)
        self._index.open(turn, RequestTags(source_type="user"))

        query = self._embed(self._encode(user))
        began = time.perf_counter()
        keys = self._choose(query) if self._recover else []
        moved = self._lift(keys)
        returning = [moved.get(key) or self.store[key] for key in keys]
        recall_s = time.perf_counter() - began
        self._follow(query)
        evicted = self._make_room(turn, room + sum(each.block.tokens for each in returning))
        began = time.perf_counter()
        self._bring_back(turn, returning)
        recall_s += time.perf_counter() - began

        answer = self._read(tokens)
        if reply is None:
            generated = self._generate(answer)
            tokens += generated
            reply = self._tokenizer.decode(generated, skip_special_tokens=True)
        self._file(turn, tokens)
        self._index.close(turn)
        return Said(
            reply,
            self.cache.tokens,
            self.cache.most,
            [self._texts[key] for key in evicted],
            [self._texts[key] for key in keys if key not in moved],
            [self._texts[key] for key in keys if key in moved],
            recall_s if returning else 0.0,
        )

    def text(self, key: bytes) -> str:
        """The text of a block of this conversation."""
        return self._texts[key]

    def resident(self, text: str) -> bool:
        """Say whether a block that holds ``text`` is in the cache."""
        return any(text in self._texts[block.key] for block in self.cache.blocks)

    # --- the parts of a turn, in order ---

    @torch.inference_mode()
    def _read_system(self) -> None:
        """The head of every conversation: pinned, so that no arm loses its attention sink."""
        self._index.open("system", RequestTags(source_type="system", pinned=True))
        tokens = self._encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
        self._read(tokens)
        self._file("system", tokens)
        self._index.close("system")

    def _choose(self, query: Array) -> list[bytes]:
        """Return what is near to the query, in reading order."""
        found = self._memory.choose(
            query,
            RECALL_BLOCKS,
            max_tokens=RECALL_TOKENS,
            threshold=THRESHOLD,
            neighbours=RECALL_NEIGHBOURS,
        )
        return [each.key for each in found]

    def _lift(self, keys: Sequence[bytes]) -> dict[bytes, StoredBlock]:
        """Take those of ``keys`` that are in the cache out of it, to land elsewhere."""
        lifted = {each.block.key: each for each in self.cache.evict(keys)}
        for key in lifted:
            self._index.drop(key, reason="capacity")
        return lifted

    def _follow(self, query: Array) -> None:
        """Let the focus follow, and tell the index which blocks cohere with it."""
        self._focus.observe(query)
        if self._listens:
            keys = [block.key for block in self.cache.blocks]
            blocks = np.array([self._embeddings[key] for key in keys])
            for key, coherence in zip(keys, self._focus.coherence(blocks), strict=True):
                self._index.signal(key, coherence=float(coherence))

    def _make_room(self, turn: str, tokens: int) -> list[bytes]:
        """Evict what the index ranks lowest until ``tokens`` more fit; return the keys."""
        if self.cache.budget is None:
            return []
        sizes = {block.key: block.tokens for block in self.cache.blocks}
        excess = self.cache.tokens + tokens - self.cache.budget
        leaving: list[bytes] = []
        for key in self._index.candidates(len(sizes) if excess > 0 else 0, protect=turn):
            if excess <= 0:
                break
            leaving.append(key)
            excess -= sizes[key]
        for stored in self.cache.evict(leaving):
            key = stored.block.key
            self._index.drop(key, reason="capacity")
            if key in self._memory:  # else it could not be found again
                self.store[key] = stored
        return leaving

    def _bring_back(self, turn: str, returning: Sequence[StoredBlock]) -> None:
        self.cache.restore(returning)
        for each in returning:
            key = each.block.key
            self.store.pop(key, None)
            self._index.insert(turn, [key])

    def _read(self, tokens: list[int]) -> int:
        """Run the model over ``tokens``; return the most likely next one."""
        self.cache.expect(len(tokens))
        seen = self.cache.blocks
        out = self._model(
            input_ids=torch.tensor([tokens]),
            cache=self.cache.dynamic,
            use_cache=True,
            output_attentions=self._listens,
            logits_to_keep=1,
        )
        if self._listens and seen:
            mass = sum(layer[0].mean((0, 1)) for layer in out.attentions).numpy()
            keys = [block.key for block in seen]
            self._attention.observe(keys, block_mass(mass, [block.tokens for block in seen]))
            for key in keys:
                self._index.signal(key, attention=self._attention.value(key))
        return int(out.logits[0, -1].argmax())

    def _generate(self, token: int) -> list[int]:
        """Go on greedily from ``token``; every token returned is in the cache."""
        generated: list[int] = []
        while len(generated) < REPLY_TOKENS and token != self._tokenizer.eos_token_id:
            generated.append(token)
            token = self._read([token])
        return generated

    def _file(self, turn: str, tokens: list[int]) -> None:
        """Cut what the model has just read into blocks, and tell the index."""
        parts = [tokens[at : at + BLOCK] for at in range(0, len(tokens), BLOCK)]
        blocks = []
        for position, part in enumerate(parts):
            [key] = chain_keys(part, len(part), parent=self._last_key or None)
            self._last_key = key
            self._texts[key] = self._tokenizer.decode(part)
            self._embeddings[key] = self._embed(part)
            if turn != "system":  # which never leaves
                forgotten = self._memory.remember(
                    key, self._embeddings[key], tokens=len(part), span=turn, position=position
                )
                self.store.pop(forgotten or b"", None)
            blocks.append(Block(key, len(part)))
        self.cache.name(blocks)
        self._index.insert(turn, [block.key for block in blocks])

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found
