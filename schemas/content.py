"""What a prompt's text is made of, wherever it stands: fingerprints of its blocks, and content-defined chunks.

The canonical chain (block_hash.py) names a block by everything before it, so one changed token at the head of a prompt gives all that
follows new names. To tell "never seen" from "seen, but after another beginning", a decision also describes the part of its prompt that no
worker held, by content alone:

    tokens      ... held by a worker | first_token                                          end of the prompt
    blocks                           | c[f]    | c[f+1]  | c[f+2]  | ...          | (rest)
    chunks                           | d0   | d1         | d2    | d3   | ...          | dn |

c are `content_fingerprints`, found again when text stays aligned to blocks (a timestamp of fixed width). d are chunks whose borders are
chosen by the tokens themselves, found again when text is shifted by any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64

U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A prompt's content from `first_token` (a multiple of the block size) on to its end.

    namespace: digest of LoRA, cache salt and what else starts its chain. fingerprints: of its full blocks from there on, shape
    (prompt_tokens // block_size - first_token // block_size,). chunks, chunk_tokens: names and lengths of its chunks, shape (chunks,);
    the lengths add up to prompt_tokens - first_token.
    """

    namespace: int
    block_size: int
    first_token: int
    prompt_tokens: int
    fingerprints: U64
    chunks: U64
    chunk_tokens: U16
