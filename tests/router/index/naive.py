"""Naive twins of the index: dictionaries of counters, walked block by block."""

from collections import Counter, defaultdict
from itertools import takewhile

from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.index.table import CPU, DISK, EXPECTED, GPU
from schemas.kv_events import COMPLETE, FIRST, LAST, WINDOW_SHIFT, WINDOWED, Kind

TIERS = (GPU, CPU, DISK)


class NaiveTable:
    """copies[slot, lane, level][hash]."""

    def __init__(self):
        self.copies = defaultdict(Counter)
        self.unknown_removals = 0

    def of(self, slot, lane=0, level=GPU):
        return self.copies[slot, lane, level]

    def store(self, slot, hashes, level=GPU, lane=0):
        self.of(slot, lane, level).update(int(h) for h in hashes)

    def remove(self, slot, hashes, level=GPU, lane=0):
        held = self.of(slot, lane, level)
        for h in map(int, hashes):
            if held[h] > 0:
                held[h] -= 1
            elif level != EXPECTED:
                self.unknown_removals += 1

    def clear(self, slot):
        for (s, _, level), held in self.copies.items():
            if s == slot and level != EXPECTED:
                held.clear()

    def rows(self):
        return len({h for held in self.copies.values() for h, n in held.items() if n > 0})

    def level(self, slot, h, full):
        """The tier of the block: the farthest, over the lanes, of the nearest that holds it; None when a lane has it nowhere."""
        best = [next((tier for tier in TIERS if self.of(slot, lane, tier)[h] > 0), None) for lane in full]
        return None if not best or None in best else max(best)

    def match(self, slot, chain, full=(0,)):
        """(held, gpu, cpu, disk, expected)"""
        chain = [int(h) for h in chain]
        levels = list(takewhile(lambda level: level is not None, (self.level(slot, h, full) for h in chain)))
        expected = list(takewhile(lambda h: self.level(slot, h, full) is not None or self.of(slot, 0, EXPECTED)[h] > 0, chain))
        return (len(levels), *(levels.count(tier) for tier in TIERS), len(expected))


class NaiveIndex:
    """The rules of prefix_index.py, a block at a time. Groups keep their own numbers; a prompt's overlap is declared and not walked."""

    def __init__(self):
        self.workers = {}
        self.expected = {}  # ticket -> [source, hashes, expires_s]

    def worker(self, source):
        return self.workers.setdefault(source, NaiveWorker())

    def apply(self, batch):
        worker = self.worker(batch.source)
        clock = (batch.epoch, batch.last_seq)
        record = (batch.first_seq, batch.bridge_time_s, batch.events.tolist(), batch.hashes.tolist())
        if worker.clock is not None and (clock < worker.clock or (clock == worker.clock and record in worker.records)):
            return
        worker.records = [*(worker.records if clock == worker.clock else []), record]
        kinds = batch.events["kind"].tolist()
        if worker.clock is None or worker.clock[0] != batch.epoch:
            if not kinds or kinds[0] != Kind.EPOCH_STARTED:
                self.start(batch.source, DEGRADED)
        elif batch.first_seq > worker.clock[1] + 1 and Kind.GAP not in kinds:
            worker.listing, worker.trust = None, min(worker.trust, DEGRADED)
        for event, hashes in batch:
            self.event(batch.source, worker, event, hashes.tolist())
        worker.clock = clock

    def start(self, source, trust):
        worker = self.worker(source)
        worker.copies, worker.groups, worker.listing, worker.trust = defaultdict(Counter), {}, None, trust
        if worker.clock is not None:
            worker.hopes = Counter()
            self.expected = {t: e for t, e in self.expected.items() if e[0] != source}

    def event(self, source, worker, event, hashes):
        kind, tier, group, flags = (int(event[name]) for name in ("kind", "tier", "group", "flags"))
        tier = min(tier, DISK)
        if kind == Kind.EPOCH_STARTED:
            self.start(source, EXACT if flags & COMPLETE else DEGRADED)
        elif kind == Kind.CLEARED:
            worker.copies, worker.listing, worker.trust = defaultdict(Counter), None, EXACT
        elif kind == Kind.GAP:
            worker.listing, worker.trust = None, min(worker.trust, DEGRADED)
        elif kind == Kind.SNAPSHOT:
            if flags & FIRST:
                worker.listing = []
                if worker.trust != EXACT:
                    worker.copies.clear()
            if worker.listing is None:
                return
            if hashes:
                worker.learn(event)
            worker.listing += hashes
            if worker.trust != EXACT:
                worker.of(group, tier).update(hashes)
            if flags & LAST:
                if worker.trust != EXACT:
                    worker.trust = EXACT if flags & COMPLETE else DEGRADED
                elif flags & COMPLETE and len(worker.listing) != sum(c.total() for c in worker.copies.values()):
                    worker.trust = DEGRADED
                worker.listing = None
        else:
            worker.listing = None
            if kind == Kind.STORED:
                worker.learn(event)
                worker.of(group, tier).update(hashes)
                if not flags & WINDOWED:
                    for h in hashes:
                        worker.hopes[h] = 0
            elif kind == Kind.REMOVED:
                held = worker.of(group, tier)
                for h in hashes:
                    held[h] = max(0, held[h] - 1)

    def expect(self, ticket, source, hashes, expires_s):
        self.expected[ticket] = (source, hashes, expires_s)
        self.worker(source).hopes.update(hashes)

    def drop(self, ticket):
        source, hashes, _ = self.expected.pop(ticket, (None, [], 0))
        for h in hashes:
            hopes = self.worker(source).hopes
            hopes[h] = max(0, hopes[h] - 1)

    def expire(self, now_s):
        for ticket in sorted((t for t, e in self.expected.items() if e[2] <= now_s), key=lambda t: (self.expected[t][2], t)):
            self.drop(ticket)


class NaiveWorker:
    def __init__(self):
        self.copies = defaultdict(Counter)  # by (group, tier)
        self.groups, self.hopes = {}, Counter()  # group -> (windowed, block size, window)
        self.clock = self.listing = None
        self.records, self.trust = [], BLIND

    def of(self, group, tier):
        return self.copies[group, tier]

    def learn(self, event):
        flags = int(event["flags"])
        self.groups.setdefault(int(event["group"]), (bool(flags & WINDOWED), int(event["block_size"]), flags >> WINDOW_SHIFT))

    def tier(self, group, h):
        return next((tier for tier in TIERS if self.of(group, tier)[h] > 0), None)

    def overlap(self, chains):
        """(held, gpu, cpu, disk, expected) of a prompt in blocks of 16; chains by block size."""
        full = {g: size for g, (windowed, size, _) in self.groups.items() if not windowed}
        own = min(full.values(), default=16)
        if own != 16:  # then the names of the chain that is asked for are not of its size
            full = {}
        chain = chains[16]
        mine = [g for g, size in full.items() if size == own]
        level = [max(tiers) if mine and None not in (tiers := [self.tier(g, h) for g in mine]) else None for h in chain]
        walked = len(list(takewhile(lambda t: t is not None, level)))
        hoped = len(list(takewhile(lambda both: both[1] is not None or self.hopes[both[0]] > 0, zip(chain, level, strict=True))))
        held = next((n for n in range(walked, 0, -1) if self.can_start_at(n * own, chains)), 0)
        return (held, *(level[:held].count(t) for t in TIERS), hoped if hoped > walked else held)

    def can_start_at(self, tokens, chains):
        """Whether an engine could take this many tokens of the prompt from its cache."""
        for group, (windowed, size, window) in self.groups.items():
            if tokens and (size not in chains or tokens % size):
                return False
            blocks = chains[size][: tokens // size] if tokens else []
            if windowed:
                blocks = blocks[-max(1, -(-(window - 1) // size)) :]
            if (len(blocks) * size < tokens and not windowed) or any(self.tier(group, h) is None for h in blocks):
                return False
        return True
