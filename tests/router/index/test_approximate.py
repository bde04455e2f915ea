"""The approximate index against a naive twin that looks through all that was sent."""

import numpy as np
import pytest

from router.index.approximate import ApproximateIndex
from router.index.table import MAX_SLOTS


class NaiveApproximate:
    def __init__(self, most_blocks, decay_s):
        self.most_blocks, self.decay_s, self.sent = most_blocks, decay_s, []

    def learn(self, slot, chain, now_s):
        chain = chain[: self.most_blocks]
        if len(chain):
            self.expire(now_s)
            while self.sent and sum(len(c) for _, _, c in self.sent) + len(chain) > self.most_blocks:
                self.sent.pop(0)
            self.sent.append((now_s, slot, set(chain.tolist())))

    def expire(self, now_s):
        self.sent = [s for s in self.sent if s[0] + self.decay_s > now_s]

    def match(self, slot, chain, now_s):
        self.expire(now_s)
        known = set().union(*(c for _, s, c in self.sent if s == slot))
        return next((i for i, h in enumerate(chain.tolist()) if h not in known), len(chain))


def names(*values):
    return np.array(values, np.uint64)


@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_the_naive_twin(seed):
    rng = np.random.default_rng(seed)
    most = int(rng.choice([50, 400]))
    index, twin = ApproximateIndex(most * 44, 20.0), NaiveApproximate(most, 20.0)
    slots = int(rng.choice([3, 70]))
    prompts = [rng.integers(1, 2**63, 60, dtype=np.uint64) for _ in range(6)]
    for prompt in prompts[1:]:
        prompt[:20] = prompts[0][:20]
    now_s = 0.0
    for _ in range(400):
        now_s += float(rng.exponential(0.7)) if rng.random() < 0.99 else 15.0
        chain = prompts[int(rng.integers(6))][: int(rng.integers(61))]
        slot = int(rng.integers(slots))
        if rng.random() < 0.6:
            index.learn(slot, chain, now_s)
            twin.learn(slot, chain, now_s)
        if rng.random() < 0.02:
            index.forget_slot(slot)
            twin.sent = [s for s in twin.sent if s[1] != slot]
        chain = prompts[int(rng.integers(6))]
        index.fit(slots)
        found = index.match(chain, now_s)
        assert found.held[:slots].tolist() == [twin.match(s, chain, now_s) for s in range(slots)]
        assert found.gpu.tolist() == found.expected.tolist() == found.held.tolist()
        assert not found.cpu.any()
        assert len(index) == sum(len(c) for _, _, c in twin.sent) <= most


def test_a_prefix_counts_until_its_decay_after_it_was_sent_last():
    index = ApproximateIndex(1 << 20, 10.0)
    index.learn(0, names(1, 2, 3), 0.0)
    index.learn(0, names(1, 2), 5.0)
    assert [int(index.match(names(1, 2, 3), t).held[0]) for t in (9.9, 10.0, 14.9, 15.0)] == [3, 2, 2, 0]
    assert (index.rows, len(index)) == (0, 0)


def test_memory_is_bounded_and_goes_to_what_was_sent_last():
    index = ApproximateIndex(1 << 20, 1e9)
    rng = np.random.default_rng(1)
    chains = [rng.integers(1, 2**63, 1000, dtype=np.uint64) for _ in range(300)]
    for i, chain in enumerate(chains):
        index.learn(i % 3, chain, float(i))
    assert index.size_bytes <= 1 << 20
    assert [int(index.match(c, 300.0).held.max()) for c in (chains[0], chains[-20], chains[-1])] == [0, 1000, 1000]
    index.learn(5, np.arange(1, 1 << 20, dtype=np.uint64), 301.0)
    assert index.size_bytes <= 1 << 20


def test_what_is_sent_all_the_time_outlives_its_first_thousands():
    index = ApproximateIndex(1 << 22, 10.0)
    for sent_s in (0.0, 5.0):
        for _ in range(1500):
            index.learn(0, names(1, 2, 3), sent_s)
    assert [int(index.match(names(1, 2, 3), t).held[0]) for t in (11.0, 15.0)] == [3, 0]


def test_it_answers_for_as_many_slots_as_the_exact_index():
    index = ApproximateIndex(1 << 20, 10.0)
    index.fit(64 * (MAX_SLOTS // 64 + 1))
    index.learn(MAX_SLOTS - 1, names(1), 0.0)
    assert index.match(names(1), 1.0).held[MAX_SLOTS - 1] == 1


def test_after_a_long_silence_it_forgets_in_pieces():
    index = ApproximateIndex(1 << 26, 10.0)
    for i in range(40):
        index.learn(0, np.arange(i * 4096 + 1, i * 4096 + 4097, dtype=np.uint64), 0.0)
    left = [len(index)]
    while left[-1]:
        index.match(names(1), 100.0)
        left.append(len(index))
    assert 4 <= len(left) < 10
