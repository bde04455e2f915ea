"""A prefix tree of block chains in bounded memory that keeps the heavy prefixes: Space-Saving over the nodes of a compressed trie.

Each item is a chain with a weight. An item weighs on its last block and on every prefix above it; T(u) is the weight of all items at or
below the prefix u.

    root ──[h1 .. h40]── A ──[h41 .. h90]── B        An edge carries the names of all its blocks (its label), so a newcomer that leaves it
                         └───[k41 .. k300]── C       half way makes a node at exactly the block where it does.

What a node holds is the weight of the items that ended there, or below it where nothing is tracked. All of it together is always the
weight of all items. When there is no room, the node with at most one child and the least `mass + edge_error` goes: its mass moves to its
parent, and the greatest value that ever went is the floor. Invariants, for every prefix u of any chain (fuzzed in the tests):

    0 <= T(u) - tracked(u) <= error(u)     tracked(u): mass of the nodes at or below u

with error(u) = the node's own `error` if u is a node, the `edge_error` of the node below if u lies inside an edge, else the floor. With
room for all items nothing ever goes, and everything is exact. At least half the nodes can go at any moment (nodes with two children are
fewer than leaves), so the floor is at most 2 (N + moved) / nodes, `moved` being the mass that went to a parent other than the root; on
real traffic it is near N / nodes.

Rejected: one sketch a level (HHH of Mitzenmacher, Steinke and Thaler, arXiv:1102.5540): 2,048 levels, and levels at powers of two only
would miss where prompts part; Space-Saving with upper bounds (a newcomer inherits the evicted count): rows of a window would not add up.

The cost of an item is that of the tracked nodes on its path plus one comparison of names in log2 steps, however long its chain is, plus one
look over all nodes when one must go (2 us).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.distinct import mix
from schemas.causes import Cause

Array = npt.NDArray[Any]

CAUSES = len(Cause)
ROOT = -1
GONE = -2
LABELS = 5
"""Labels of a node: its kind, and the parts of it: model, route, tenant, template."""
HISTOGRAM_BUCKETS = 64
HISTOGRAM_FLOOR_S = 0.01
MAX_DEPTH = 16_384
"""Blocks of a chain that are looked at; an item beyond weighs on this one."""
_NEVER = 1 << 62
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LONG_S = HISTOGRAM_FLOOR_S * 2 ** (HISTOGRAM_BUCKETS // 2)

FREE, FLOOR, WEIGHT, END, LIVE, MOVED, MIXED, EVICTED, ITEMS, LABEL_BUDGET, NODES = range(11)
"""Places in `Trie.n`: free nodes; the floor; weight of all items; end of the used label space and names alive in it; mass moved to parents
other than the root; mass that roots got under a label that may not be its own; evictions; items; label space; nodes."""


NODE = np.dtype(
    [
        ("name", "<u8"),  # hash of the prefix
        ("depth", "<i8"),  # blocks
        ("block_size", "<i8"),
        ("parent", "<i8"),
        ("children", "<i8"),
        ("child_xor", "<i8"),  # xor of the children's numbers: the child where there is one
        ("label_at", "<i8"),
        ("label_length", "<i8"),
        ("mass", "<i8"),
        ("error", "<i8"),
        ("edge_error", "<i8"),
    ]
)
SAID = np.dtype(
    [
        ("tokens", "<i8", (CAUSES,)),
        ("requests", "<i8"),
        ("seconds", "<f8"),
        ("seconds_tokens", "<i8"),  # tokens whose seconds are known
        ("workers", "<u8"),  # a bit a worker
        ("newest", "<i8"),  # serial number of the newest request; 0: none
        ("labels", "<i8", (LABELS,)),  # the majority vote's candidate
        ("votes", "<i8", (LABELS,)),  # its lead, tokens
        ("times", "<u4", (2, HISTOGRAM_BUCKETS)),  # blocks by gone_s and by idle_s
    ]
)
"""What was lost."""


class Trie(NamedTuple):
    n: Array
    node: Array
    """NODE, (nodes,)"""
    said: Array
    """SAID, (nodes + kinds,): row v of node v; row nodes + k of what the root has of kind k."""
    worth: Array
    """i64 (nodes,): mass + edge_error of nodes that can go."""
    free: Array
    """i64 (nodes,): numbers of free nodes, the first n[FREE] of them."""
    slot_key: Array
    """Table: `_edge` of a node and the first block of an edge below it -> the node at that edge's end."""
    slot_node: Array
    names: Array
    """Label space."""


def make(nodes: int, kinds: int, label_space: int) -> Trie:
    """nodes >= 4. Pages of these arrays are touched as they fill."""
    slots = 1 << max(3, (4 * nodes - 1).bit_length())
    trie = Trie(
        n=np.zeros(11, np.int64),
        node=np.zeros(nodes, NODE),
        said=np.zeros(nodes + kinds, SAID),
        worth=np.full(nodes, _NEVER, np.int64),
        free=np.arange(nodes - 1, -1, -1, dtype=np.int64),
        slot_key=np.zeros(slots, np.uint64),
        slot_node=np.full(slots, -1, np.int64),
        names=np.zeros(label_space + 2 * MAX_DEPTH, np.uint64),
    )
    trie.node["parent"] = GONE
    trie.n[FREE], trie.n[LABEL_BUDGET], trie.n[NODES] = nodes, max(label_space, MAX_DEPTH), nodes
    return trie


def bucket_middle_s(bucket: int) -> float:
    """The time that stands for a bucket; two buckets an octave, so it is within 19 %."""
    return float(HISTOGRAM_FLOOR_S * 2 ** ((bucket - 0.5) / 2)) if bucket else HISTOGRAM_FLOOR_S


@numba.njit(cache=True)
def _bucket(value_s):  # type: ignore[no-untyped-def]
    if value_s <= HISTOGRAM_FLOOR_S:
        return 0
    if value_s >= _LONG_S:
        return HISTOGRAM_BUCKETS - 1
    return min(HISTOGRAM_BUCKETS - 1, 1 + int(2 * math.log2(value_s / HISTOGRAM_FLOOR_S)))


@numba.njit(cache=True, inline="always")
def _edge(parent, first):  # type: ignore[no-untyped-def]
    """Key of the edge that leaves `parent` with this block. Chained names alone would do; a router may send others, or one twice."""
    return mix(first + np.uint64(parent + 1) * _ODD)


@numba.njit(cache=True)
def _slot(t, key):  # type: ignore[no-untyped-def]
    """Where the key is, or the empty slot where it would be."""
    mask = np.uint64(len(t.slot_key) - 1)
    at = key & mask
    while t.slot_node[at] >= 0 and t.slot_key[at] != key:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@numba.njit(cache=True)
def _enter(t, key, node):  # type: ignore[no-untyped-def]
    at = _slot(t, key)
    t.slot_key[at] = key
    t.slot_node[at] = node


@numba.njit(cache=True)
def _drop(t, key):  # type: ignore[no-untyped-def]
    """Later entries of the same run move up, so that no lookup ends early."""
    mask = len(t.slot_key) - 1
    hole = _slot(t, key)
    t.slot_node[hole] = -1
    at = (hole + 1) & mask
    while t.slot_node[at] >= 0:
        home = np.int64(t.slot_key[at] & np.uint64(mask))
        if ((at - home) & mask) >= ((at - hole) & mask):
            t.slot_key[hole] = t.slot_key[at]
            t.slot_node[hole] = t.slot_node[at]
            t.slot_node[at] = -1
            hole = at
        at = (at + 1) & mask


@numba.njit(cache=True)
def _weigh(t, v):  # type: ignore[no-untyped-def]
    t.worth[v] = t.node[v].mass + t.node[v].edge_error if t.node[v].children <= 1 else _NEVER


@numba.njit(cache=True)
def _vote(t, row, which, label, tokens):  # type: ignore[no-untyped-def]
    """Majority vote of Boyer and Moore, weighted: a label of more than half of the tokens wins."""
    if t.said[row].labels[which] == label:
        t.said[row].votes[which] += tokens
    elif t.said[row].votes[which] >= tokens:
        t.said[row].votes[which] -= tokens
    else:
        t.said[row].labels[which] = label
        t.said[row].votes[which] = tokens - t.said[row].votes[which]


@numba.njit(cache=True)
def _move(t, source, target):  # type: ignore[no-untyped-def]
    """Adds what row source holds to row target."""
    for c in range(CAUSES):
        t.said[target].tokens[c] += t.said[source].tokens[c]
    t.said[target].requests += t.said[source].requests
    t.said[target].seconds += t.said[source].seconds
    t.said[target].seconds_tokens += t.said[source].seconds_tokens
    t.said[target].workers |= t.said[source].workers
    t.said[target].newest = max(t.said[target].newest, t.said[source].newest)
    for which in range(LABELS):
        if t.said[source].votes[which] > 0:
            _vote(t, target, which, t.said[source].labels[which], t.said[source].votes[which])
    for which in range(2):
        for b in range(HISTOGRAM_BUCKETS):
            t.said[target].times[which, b] += t.said[source].times[which, b]


@numba.njit(cache=True)
def _kind_row(t, v):  # type: ignore[no-untyped-def]
    """Where the root keeps what is of this node's kind; without a majority that of no kind."""
    return t.n[NODES] + (t.said[v].labels[0] if t.said[v].votes[0] else 0)


@numba.njit(cache=True)
def _clear(t, row):  # type: ignore[no-untyped-def]
    t.said[row].tokens[:] = 0
    t.said[row].requests = 0
    t.said[row].seconds = 0.0
    t.said[row].seconds_tokens = 0
    t.said[row].workers = 0
    t.said[row].newest = 0
    t.said[row].labels[:] = 0
    t.said[row].votes[:] = 0
    t.said[row].times[:] = 0


@numba.njit(cache=True)
def _new(t, name, depth, block_size, parent, error):  # type: ignore[no-untyped-def]
    t.n[FREE] -= 1
    v = t.free[t.n[FREE]]
    t.node[v].name = name
    t.node[v].depth = depth
    t.node[v].block_size = block_size
    t.node[v].parent = parent
    t.node[v].children = 0
    t.node[v].child_xor = 0
    t.node[v].mass = 0
    t.node[v].label_at = 0
    t.node[v].label_length = 0
    t.node[v].error = error
    t.node[v].edge_error = error
    if parent >= 0:
        t.node[parent].children += 1
        t.node[parent].child_xor ^= v
        _weigh(t, parent)
    return v


@numba.njit(cache=True)
def _compact(t):  # type: ignore[no-untyped-def]
    """Labels of nodes that are left move together."""
    kept = np.empty(t.n[LIVE], np.uint64)
    end = 0
    for v in range(len(t.node)):
        if t.node[v].parent != GONE:
            at, length = t.node[v].label_at, t.node[v].label_length
            for i in range(length):
                kept[end + i] = t.names[at + i]
            t.node[v].label_at = end
            end += length
    for i in range(end):
        t.names[i] = kept[i]
    t.n[END] = end


@numba.njit(cache=True)
def _space(t, length):  # type: ignore[no-untyped-def]
    """Where `length` names can be written. The space beyond the budget is for this: after `_compact` there is always enough."""
    if t.n[END] + length > len(t.names):
        _compact(t)
    at = t.n[END]
    t.n[END] += length
    return at


@numba.njit(cache=True)
def _evict(t, v):  # type: ignore[no-untyped-def]
    value = t.node[v].mass + t.node[v].edge_error
    t.n[FLOOR] = max(t.n[FLOOR], value)
    t.n[EVICTED] += 1
    parent = t.node[v].parent
    if parent >= 0:
        _move(t, v, parent)
        t.node[parent].mass += t.node[v].mass
        t.n[MOVED] += t.node[v].mass
        t.node[parent].child_xor ^= v
    elif t.node[v].mass > 0:
        _move(t, v, _kind_row(t, v))
        t.n[MIXED] += t.node[v].mass - t.said[v].votes[0]
    first = t.names[t.node[v].label_at]
    if t.node[v].children == 0:
        _drop(t, _edge(parent, first))
        t.n[LIVE] -= t.node[v].label_length
        if parent >= 0:
            t.node[parent].children -= 1
    else:  # its only child hangs on the whole edge now
        c = t.node[v].child_xor
        _drop(t, _edge(v, t.names[t.node[c].label_at]))
        above, below = t.node[v].label_length, t.node[c].label_length
        if t.node[v].label_at + above == t.node[c].label_at:
            t.node[c].label_at = t.node[v].label_at
        else:
            at = _space(t, above + below)
            for i in range(above):
                t.names[at + i] = t.names[t.node[v].label_at + i]
            for i in range(below):
                t.names[at + above + i] = t.names[t.node[c].label_at + i]
            t.node[c].label_at = at
        t.node[c].label_length = above + below
        _enter(t, _edge(parent, first), c)
        t.node[c].parent = parent
        t.node[c].edge_error = max(t.node[c].edge_error, value)
        _weigh(t, c)
        if parent >= 0:
            t.node[parent].child_xor ^= c
    if parent >= 0:
        _weigh(t, parent)
    _clear(t, v)
    t.node[v].mass = 0
    t.node[v].parent = GONE
    t.worth[v] = _NEVER
    t.node[v].label_length = 0
    t.free[t.n[FREE]] = v
    t.n[FREE] += 1


@numba.njit(cache=True)
def _make_room(t, length):  # type: ignore[no-untyped-def]
    """For two nodes and a label."""
    while t.n[FREE] < 2:
        _evict(t, np.argmin(t.worth))
    while t.n[LIVE] + length > t.n[LABEL_BUDGET]:  # only leaves free names
        least = np.int64(-1)
        for v in range(t.n[NODES]):
            if t.node[v].parent != GONE and t.node[v].children == 0 and (least < 0 or t.worth[v] < t.worth[least]):
                least = np.int64(v)
        _evict(t, least)


@numba.njit(cache=True)
def _place(t, chain, blocks, block_size):  # type: ignore[no-untyped-def]
    """The node at chain[blocks - 1], made where there is none; blocks >= 1."""
    _make_room(t, blocks)
    parent, depth = np.int64(ROOT), 0
    while depth < blocks:
        found = t.slot_node[_slot(t, _edge(parent, chain[depth]))]
        if found < 0:
            break
        at, length = t.node[found].label_at, t.node[found].label_length
        if depth + length <= blocks and t.names[at + length - 1] == chain[depth + length - 1]:
            parent, depth = found, depth + length
            continue
        low, high = 1, min(length, blocks - depth)  # names are chained: equal up to some block, different from there on
        while low < high:
            middle = (low + high + 1) // 2
            if t.names[at + middle - 1] == chain[depth + middle - 1]:
                low = middle
            else:
                high = middle - 1
        between = _new(t, chain[depth + low - 1], depth + low, block_size, parent, t.node[found].edge_error)
        if parent >= 0:
            t.node[parent].children -= 1
            t.node[parent].child_xor ^= found
            _weigh(t, parent)
        t.node[between].label_at, t.node[between].label_length = at, low
        t.node[found].label_at, t.node[found].label_length = at + low, length - low
        _enter(t, _edge(parent, chain[depth]), between)
        _enter(t, _edge(between, t.names[at + low]), found)
        t.node[found].parent = between
        t.node[between].children = 1
        t.node[between].child_xor = found
        _weigh(t, between)
        parent, depth = between, depth + low
        break
    if depth == blocks:
        return parent
    leaf = _new(t, chain[blocks - 1], blocks, block_size, parent, t.n[FLOOR])
    length = blocks - depth
    at = _space(t, length)
    for i in range(length):
        t.names[at + i] = chain[depth + i]
    t.node[leaf].label_at, t.node[leaf].label_length = at, length
    t.n[LIVE] += length
    _enter(t, _edge(parent, chain[depth]), leaf)
    _weigh(t, leaf)
    return leaf


@numba.njit(cache=True)
def add(  # type: ignore[no-untyped-def]
    t,
    counted,
    chains,
    chain_ends,
    causes,
    gone_s,
    idle_s,
    run_causes,
    run_tokens,
    run_seconds,
    run_ends,
    labels,
    workers,
    block_sizes,
    serial,
):
    """Adds requests, in order. Per block: chains, causes, gone_s, idle_s, cut by chain_ends; per run: run_*, cut by run_ends; per request:
    labels (n, LABELS), workers (a bit number), block_sizes, and the numbers from serial on. counted: causes that weigh.

    A request's item is all its counted tokens, on the last block whose cause is counted: on the root where there is none."""
    b_from, r_from = 0, 0
    tokens = np.zeros(CAUSES, np.int64)
    for q in range(len(chain_ends)):
        b_to, r_to = chain_ends[q], run_ends[q]
        tokens[:] = 0
        weight, seconds, seconds_tokens = np.int64(0), 0.0, np.int64(0)
        for r in range(r_from, r_to):
            if counted[run_causes[r]]:
                tokens[run_causes[r]] += run_tokens[r]
                weight += run_tokens[r]
                if not np.isnan(run_seconds[r]):
                    seconds += run_seconds[r]
                    seconds_tokens += run_tokens[r]
        if weight:
            blocks = b_to - b_from
            while blocks and not counted[causes[b_from + blocks - 1]]:
                blocks -= 1
            if blocks:
                row = _place(t, chains[b_from:b_to], min(blocks, MAX_DEPTH), block_sizes[q])
                t.node[row].mass += weight
                _weigh(t, row)
            else:
                row = t.n[NODES] + labels[q, 0]
            for c in range(CAUSES):
                t.said[row].tokens[c] += tokens[c]
            t.said[row].requests += 1
            t.said[row].seconds += seconds
            t.said[row].seconds_tokens += seconds_tokens
            t.said[row].workers |= np.uint64(1) << np.uint64(workers[q])
            t.said[row].newest = serial + q
            for which in range(LABELS):
                _vote(t, row, which, labels[q, which], weight)
            for b in range(b_from, b_from + blocks):
                if not np.isnan(gone_s[b]):
                    t.said[row].times[0, _bucket(gone_s[b])] += np.uint32(1)
                if not np.isnan(idle_s[b]):
                    t.said[row].times[1, _bucket(idle_s[b])] += np.uint32(1)
            t.n[WEIGHT] += weight
            t.n[ITEMS] += 1
        b_from, r_from = b_to, r_to


@numba.njit(cache=True)
def _heavy(t, threshold, least_requests, deepest_first, heavy, total):  # type: ignore[no-untyped-def]
    mixed = t.n[MIXED]
    for v in deepest_first:
        parent = t.node[v].parent
        if parent == GONE:
            continue
        own = np.int64(0)
        for c in range(CAUSES):
            own += t.said[v].tokens[c]
        total[v] += own
        if own >= threshold and t.said[v].requests >= least_requests:
            heavy[v] = True
        elif parent >= 0:
            _move(t, v, parent)
        elif own:
            _move(t, v, _kind_row(t, v))
            mixed += own - t.said[v].votes[0]
        if parent >= 0:
            total[parent] += total[v] if heavy[v] else total[v] - own
    return mixed


def heavy(trie: Trie, threshold: int, least_requests: int) -> tuple[Trie, npt.NDArray[np.bool_], npt.NDArray[np.int64], int]:
    """Which nodes weigh at least `threshold` without what their own heavy descendants weigh, in at least so many requests.

    Returns a trie in which each heavy node, and each kind of the root, holds all that no heavy node below it does; which nodes are heavy
    (nodes,); what each weighs with all its descendants (nodes,); and by how much kinds of the root can be wrong, tokens."""
    said = trie._replace(said=trie.said.copy())
    nodes = len(trie.node)
    flags, total = np.zeros(nodes, np.bool_), np.zeros(nodes, np.int64)
    deepest_first = np.argsort(-trie.node["depth"], kind="stable")
    mixed = int(_heavy(said, threshold, least_requests, deepest_first, flags, total))
    return said, flags, total, mixed
