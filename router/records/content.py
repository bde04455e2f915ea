"""What a decision says of its prompt's content: fingerprints and chunks of the part that no worker holds, and where it stops being alike.

Made when the request is on its way already, for nothing of it is needed to route: 33 us and 2.5 KB of record for 2,000 new tokens in blocks
of 16, 0.26 ms and 41 KB for 32,000 (one core, AMD EPYC). What workers hold is left out, so a conversation that goes on costs next to
nothing. A prompt is described once, also if it has to be sent again.

`shared_tokens` is told from prompts, not from names: the first `KEPT_TOKENS` of the last `KEPT_PROMPTS` prompts of each kind (pool, and
template, else route) are kept, one of each conversation, so that "they differ at token 37" is exact. At most 25 MB, for `KEPT_KINDS` kinds,
the one that was silent longest out first. Token ids never leave this process.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from router.prompts.prompt import Prompt
from schemas.block_hash import U32, HashKey
from schemas.content import described, plain_ids
from schemas.requests import pack_hashes, pack_lengths

SNIPPET_CHARACTERS = 200
KEPT_PROMPTS = 6
KEPT_TOKENS = 4096
KEPT_KINDS = 256

Kind = tuple[str, str]
"""Pool, and template or route."""


def content_fields(
    key: HashKey, prompt: Prompt, best_overlap_tokens: int | None, kind: Kind, session: str | None, recent: RecentPrompts
) -> dict[str, Any]:
    """Fields of a Decision; none for a prompt whose token ids are not known, or that is not looked up. Remembers the prompt in `recent`."""
    chain, size, ids = prompt.recorded_chain, prompt.block_size, prompt.ids
    if chain is None or size is None or ids is None or len(ids) != prompt.tokens:
        return {}
    first_block = min((best_overlap_tokens or 0) // size, len(chain))
    made = described(key, ids, size, first_block, prompt.lora, prompt.salt)
    return {
        "namespace": made.namespace,
        "content_from": first_block,
        "content": pack_hashes(made.fingerprints),
        "chunks": pack_hashes(made.chunks),
        "chunk_tokens": pack_lengths(made.chunk_tokens),
        "shared_tokens": recent.shared(kind, session, ids),
    }


class RecentPrompts:
    """Beginnings of the last prompts of each kind."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Kept] = OrderedDict()

    def shared(self, kind: Kind, session: str | None, ids: U32) -> int | None:
        """How many tokens the prompt has in common with one of them, the most with any, before the first that differs. None: there is
        none, or there is no difference to that one as far as it was kept: it goes on, or is alike. Remembers the prompt."""
        kept = self._kinds.get(kind)
        if kept is None:
            kept = self._kinds[kind] = _Kept()
            if len(self._kinds) > KEPT_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        ids = plain_ids(ids[:KEPT_TOKENS])
        longest, differs, continues = _common(kept.tokens, kept.lengths, ids, kept.common)
        kept.keep(ids, session, continues)
        return int(longest) if differs else None

    def held_bytes(self) -> int:
        return sum(kept.tokens.nbytes for kept in self._kinds.values())


@dataclass(slots=True, eq=False)
class _Kept:
    """lengths: 0: a free place. A conversation's newer prompt takes the place of its older one, else that of the oldest.
    common: tokens that each has in common with the newest."""

    tokens: U32 = field(default_factory=lambda: np.empty((KEPT_PROMPTS, KEPT_TOKENS), np.uint32))
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEPT_PROMPTS, np.int64))
    common: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEPT_PROMPTS, np.int64))
    sessions: list[str | None] = field(default_factory=lambda: [None] * KEPT_PROMPTS)
    oldest_first: list[int] = field(default_factory=lambda: list(range(KEPT_PROMPTS)))

    def keep(self, ids: U32, session: str | None, continues: int) -> None:
        if not len(ids):
            return
        if session is not None and session in self.sessions:
            place = self.sessions.index(session)
        else:
            place = continues if continues >= 0 else self.oldest_first[0]
        self.oldest_first.remove(place)
        self.oldest_first.append(place)
        known = int(self.common[place])
        self.tokens[place, known : len(ids)] = ids[known:]
        self.lengths[place], self.sessions[place] = len(ids), session


@numba.njit("UniTuple(i8, 3)(u4[:, ::1], i8[::1], u4[::1], i8[::1])", cache=True)
def _common(tokens, lengths, ids, common):  # type: ignore[no-untyped-def]
    """Longest common prefix with any row; whether a row with so much differs there; a row that ids begins with as far as both go, or -1."""
    longest, differs, continues = 0, 0, -1
    for row in range(len(lengths)):
        n, i = min(lengths[row], len(ids)), 0
        while i < n and tokens[row, i] == ids[i]:
            i += 1
        common[row] = i
        if not n:
            continue
        if i == n == lengths[row]:
            continues = row
        if i > longest:
            longest, differs = i, 0
        if i == longest and i < n:
            differs = 1
    return longest, differs, continues
