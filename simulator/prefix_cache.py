"""A pure model of vLLM's prefix cache: which blocks a worker holds, what a prompt hits, what is evicted, what is published.

Why pure: the mock engine drives it step by step in real time, `fleet` in virtual time, tests as they like; all get the same
answers. There is no clock, socket or randomness in here. Rules, from the engine's source and from its recorded streams:

- A block is `block_size` tokens. Only full blocks are cached. Its hash covers its tokens and all before them (a chain).
- A pool of `num_gpu_blocks - 1` physical blocks (block 0 is a placeholder). Each counts the requests that hold it.
- A block that no request holds goes to the free queue and *stays cached* until it is taken for new content. A request
  frees its blocks tail first, so of one prefix the far end is evicted before the head. The queue is least recently freed first,
  but a block without cached content (the partial last one) goes to its head: it costs nothing to take. (Recorded runs a and b
  show it: without this rule 19 and 332 blocks are evicted where the engine evicted 13 and 316.)
- A hit ends before the last token of the prompt, which is always computed: at most `(tokens - 1) // block_size` blocks.
- Equal content computed twice is two physical blocks under one hash. The one cached first is the one that is hit.
- Blocks are entered when the step that computes them is *scheduled*, so requests admitted in one step hit each other's blocks.
- Removals precede the stores that caused them. A reset is refused while a block is held; its event waits, as all events do,
  for the next step that publishes.

    free queue   head [empty] -> [oldest freed] -> ... -> [latest freed] tail
                  |  take: evict what it holds (one BlockRemoved)      ^ release: tail block of a request first
                  v                                                    |
    request      [hit: touched, off the queue][new: taken from head][...]

Rejected: a set of hashes with sizes. It can't tell duplicates, and with them neither evictions nor counts come out as the engine's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from simulator.kv_wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

MEDIUM = "GPU"
GROUP = 0
SPEC_KIND = "full_attention"
ROOT_DIGEST = hashlib.sha256(b"vllm-none-hash").digest()
"""Parent of every first block: one constant for all workers, as in vLLM from 0.29."""


def block_digest(parent: bytes, tokens: bytes, extra: Sequence[str] | None = None) -> bytes:
    """32-byte digest of a block: its parent's digest, its tokens (packed u32), what else tells it apart.

    The same construction as the engine's (chained SHA-256 over parent, tokens, extra keys) but over packed bytes
    rather than a pickle: the values differ from a real engine's, what is equal and what differs does not."""
    if extra:
        return hashlib.sha256(parent + tokens + "\0".join(("", *extra)).encode()).digest()
    return hashlib.sha256(parent + tokens).digest()


@lru_cache(maxsize=512)
def _prompt_digests(tokens: bytes, block_bytes: int, first_extra: tuple[str, ...], all_extra: tuple[str, ...]) -> tuple[bytes, ...]:
    digests: list[bytes] = []
    parent = ROOT_DIGEST
    for at in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = block_digest(parent, tokens[at : at + block_bytes], all_extra + first_extra if at == 0 else all_extra)
        digests.append(parent)
    return tuple(digests)


class BlockTable:
    """One request's tokens and the physical blocks that hold them. Made by `PrefixCache.open`, changed by the cache alone,
    except that the scheduler appends generated tokens with `append`."""

    __slots__ = (
        "_block_bytes",
        "block_size",
        "blocks",
        "digests",
        "full_report",
        "lora_name",
        "prompt_tokens",
        "request_id",
        "salt",
        "session_id",
        "stored_blocks",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        tokens: array[int],
        block_size: int,
        salt: str | None,
        lora_name: str | None,
        session_id: str | None,
        full_report: bool,
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.prompt_tokens = len(tokens)
        self.salt = salt
        self.lora_name = lora_name
        self.session_id = session_id
        self.full_report = full_report
        self.blocks: list[int] = []
        self.stored_blocks = 0  # leading blocks of this request that are in the cache, hit or entered
        self.block_size = block_size
        self._block_bytes = block_size * tokens.itemsize
        self.digests = list(_prompt_digests(tokens.tobytes(), self._block_bytes, (salt,) if salt else (), self._all_extra()))

    def _all_extra(self) -> tuple[str, ...]:
        return (self.lora_name,) if self.lora_name else ()

    def extra_keys(self, block: int) -> list[str] | None:
        """What went into the hash of block number `block` beside parent and tokens."""
        extra = [self.lora_name] if self.lora_name else []
        if self.salt and block == 0:
            extra.append(self.salt)
        return extra or None

    def append(self, token: int) -> None:
        """A generated token. It takes part in the cache once it has been computed as input of a later step."""
        self.tokens.append(token)

    def digests_to(self, blocks: int) -> list[bytes]:
        """Digests of at least the first `blocks` blocks, which must be full."""
        digests, size = self.digests, self._block_bytes
        if len(digests) < blocks:
            packed = memoryview(self.tokens).cast("B")
            while len(digests) < blocks:
                n = len(digests)
                content = bytes(packed[n * size : (n + 1) * size])
                digests.append(block_digest(digests[n - 1] if n else ROOT_DIGEST, content, self.extra_keys(n)))
            packed.release()
        return digests


class PrefixCache:
    """The block pool of one worker and rank. Methods never block; events pile up until `take_events`."""

    def __init__(self, num_gpu_blocks: int, block_size: int, int_hashes: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise ValueError("num_gpu_blocks must be at least 2: block 0 is a placeholder")
        if block_size < 1:
            raise ValueError("block_size must be at least 1 token")
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.int_hashes = int_hashes
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, num_gpu_blocks))
        self._references = [0] * num_gpu_blocks
        self._digest_of: list[bytes | None] = [None] * num_gpu_blocks
        self._blocks_of: dict[bytes, list[int]] = {}  # copies in the order they were cached
        self._withheld: list[int] = []
        self._withhold_target = 0
        self._events: list[KvEvent] = []

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """Blocks that requests can use."""
        return self.num_gpu_blocks - 1 - self._withhold_target

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        """Blocks that requests hold now. Cached but free blocks do not count."""
        return self.num_gpu_blocks - 1 - len(self._free) - len(self._withheld)

    @property
    def cached_blocks(self) -> int:
        """Physical blocks with cached content, duplicates counted."""
        return sum(len(copies) for copies in self._blocks_of.values())

    def resident(self) -> dict[BlockHash, int]:
        """Published hash -> number of physical copies. Ground truth for tests of readers of the stream."""
        return {self._name(digest): len(copies) for digest, copies in self._blocks_of.items()}

    # -- a request's way ----------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        salt: str | None = None,
        lora_name: str | None = None,
        session_id: str | None = None,
        full_report: bool = False,
    ) -> BlockTable:
        """A table for a new request. Takes no block yet."""
        tokens = prompt if isinstance(prompt, array) else array("I", prompt)
        return BlockTable(request_id, tokens, self.block_size, salt, lora_name, session_id, full_report)

    def lookup(self, table: BlockTable) -> list[int]:
        """Physical blocks of the longest cached prefix, at most all tokens but the last. Changes nothing."""
        limit = (len(table.tokens) - 1) // self.block_size
        hit: list[int] = []
        find = self._blocks_of.get
        for digest in table.digests_to(limit)[:limit]:
            copies = find(digest)
            if copies is None:
                break
            hit.append(copies[0])
        return hit

    def admit(self, table: BlockTable, hit: list[int], new_tokens: int, reserve_tokens: int = 0) -> bool:
        """Hold the `hit` blocks and take blocks for `new_tokens` more; enter the full ones. False, changing nothing, when the
        pool is too full. `reserve_tokens`: room that must be there for the request's whole length, though not taken yet."""
        if table.blocks:
            raise ValueError(f"request {table.request_id} already holds blocks")
        idle_hits = sum(1 for b in hit if self._references[b] == 0)
        need = self._blocks_for(max(len(hit) * self.block_size + new_tokens, reserve_tokens)) - len(hit)
        if need + idle_hits > len(self._free):
            return False
        for block in hit:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        table.blocks = list(hit)
        table.stored_blocks = len(hit)
        if table.full_report and hit:
            self._publish_stored(table, 0, len(hit))
        return self.extend(table, len(hit) * self.block_size + new_tokens)

    def extend(self, table: BlockTable, computed_tokens: int) -> bool:
        """Take blocks so that the first `computed_tokens` tokens have room, and enter those that became full.
        False, changing nothing, when the pool has not enough free blocks."""
        need = self._blocks_for(computed_tokens) - len(table.blocks)
        if need > 0:
            if need > len(self._free):
                return False
            for _ in range(need):
                table.blocks.append(self._take())
        full = computed_tokens // self.block_size
        if full > table.stored_blocks:
            digests = table.digests_to(full)
            for n in range(table.stored_blocks, full):
                block = table.blocks[n]
                self._digest_of[block] = digests[n]
                self._blocks_of.setdefault(digests[n], []).append(block)
            self._publish_stored(table, table.stored_blocks, full)
            table.stored_blocks = full
        return True

    def release(self, table: BlockTable) -> None:
        """Let go of the request's blocks, tail first. What is cached stays so until its block is taken."""
        references, free = self._references, self._free
        for block in reversed(table.blocks):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if self._digest_of[block] is None:
                    free.move_to_end(block, last=False)  # nothing to lose: taken first
        table.blocks = []
        table.stored_blocks = 0
        if len(self._withheld) < self._withhold_target:
            self._withhold()

    # -- the whole pool -----------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget all cached content. False, publishing nothing, while any request holds a block."""
        if self.held_blocks:
            return False
        for copies in self._blocks_of.values():
            for block in copies:
                self._digest_of[block] = None
        self._blocks_of.clear()
        self._events.append(AllBlocksCleared())
        return True

    def limit_capacity(self, blocks: int) -> None:
        """Let requests use only `blocks` blocks from now on (no engine does this; it makes a shrinking cache without a restart).
        Free blocks are withheld at once, oldest first and with their removals; held ones when they are released."""
        if not 1 <= blocks <= self.num_gpu_blocks - 1:
            raise ValueError(f"capacity must be 1 to {self.num_gpu_blocks - 1} blocks")
        self._withhold_target = self.num_gpu_blocks - 1 - blocks
        while len(self._withheld) > self._withhold_target:
            block = self._withheld.pop()
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._withhold()

    def take_events(self) -> list[KvEvent]:
        """All events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- inside -------------------------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _name(self, digest: bytes) -> BlockHash:
        return int.from_bytes(digest[-8:], "big") if self.int_hashes else digest

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._evict(block)
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is None:
            return
        self._digest_of[block] = None
        copies = self._blocks_of[digest]
        if len(copies) == 1:
            del self._blocks_of[digest]
        else:
            copies.remove(block)
        self._events.append(BlockRemoved([self._name(digest)], MEDIUM, GROUP))

    def _withhold(self) -> None:
        while len(self._withheld) < self._withhold_target and self._free:
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self._withheld.append(block)

    def _publish_stored(self, table: BlockTable, first: int, end: int) -> None:
        size = self.block_size
        digests = table.digests
        self._events.append(
            BlockStored(
                block_hashes=[self._name(d) for d in digests[first:end]],
                parent_block_hash=self._name(digests[first - 1]) if first else None,
                token_ids=table.tokens[first * size : end * size].tolist(),
                block_size=size,
                lora_id=1 if table.lora_name else None,
                medium=MEDIUM,
                lora_name=table.lora_name,
                extra_keys=[table.extra_keys(n) for n in range(first, end)],
                group_idx=GROUP,
                kv_cache_spec_kind=SPEC_KIND,
                session_id=table.session_id,
            )
        )
