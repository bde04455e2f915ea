import numpy as np
import pytest

from router.policy.view import SlotMap, tokens_by_target, trust_by_target


@pytest.mark.parametrize("seed", range(20))
def test_the_kernels_agree_with_their_naive_twins(seed):
    rng = np.random.default_rng(seed)
    slots = [rng.choice(64, rng.integers(1, 4), replace=False).tolist() for _ in range(int(rng.integers(1, 20)))]
    parts = np.sort(rng.integers(0, 9, (4, 64)), axis=0).astype(np.int32)
    gpu, cpu, disk, expected = parts[0], parts[1] - parts[0], parts[2] - parts[1], parts[3]
    got = tokens_by_target(SlotMap.of(slots), (gpu, cpu, disk), expected, 16)
    for t, own in enumerate(slots):
        best = max(own, key=lambda s: expected[s])
        assert got[:, t].tolist() == [16 * int(a[best]) for a in (gpu, cpu, disk, expected)]
    trust, heard_s = rng.integers(0, 3, 64).astype(np.uint8), rng.random(64) * 100
    level_s = float(rng.random() * 200)
    found = trust_by_target(SlotMap.of(slots), trust, heard_s, level_s, 70.0, 30.0)
    for t, own in enumerate(slots):
        words = [min(heard_s[s], level_s) for s in own]
        caps = [0 if w < 30 else 1 if w < 70 else 2 for w in words]
        assert found[t] == min(min(c, trust[s]) for c, s in zip(caps, own, strict=True))


def test_no_targets_are_no_rows():
    nothing = np.zeros(64, np.int32)
    assert tokens_by_target(SlotMap.of([]), (nothing, nothing, nothing), nothing, 16).shape == (4, 0)
