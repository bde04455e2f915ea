import numpy as np
import pytest

from router.policy.eligible import WARM_HIT, eligible

N = 4


def left(drain_min_hit=0.5, prompt_tokens=1000, **given):
    of = {"allowed": np.ones(N, bool), "trust": np.full(N, 2, np.uint8), "draining": np.zeros(N, bool), "cold": np.full(N, np.inf)}
    of |= {name: np.zeros(N, np.int64) for name in ("gpu", "cpu", "disk")}
    of |= {k: np.array(v, of[k].dtype) for k, v in given.items() if k != "expected"}
    expected = np.array(given.get("expected", of["gpu"] + of["cpu"] + of["disk"]), np.int64)
    mask = eligible(
        of["allowed"], prompt_tokens, of["gpu"], of["cpu"], of["disk"], expected, of["trust"], of["draining"], of["cold"], drain_min_hit
    )
    return np.flatnonzero(mask).tolist()


def test_a_draining_worker_takes_only_what_goes_on_there():
    draining = [True, False, False, False]
    assert left(draining=draining) == [1, 2, 3]
    assert left(draining=draining, gpu=[480, 0, 0, 0]) == [1, 2, 3]
    assert left(draining=draining, gpu=[496, 0, 0, 0], expected=[512, 0, 0, 0]) == [0, 1, 2, 3]
    assert left(draining=draining, cpu=[400, 0, 0, 0], disk=[112, 0, 0, 0]) == [0, 1, 2, 3]


def test_with_a_least_share_of_zero_it_still_takes_nothing_cold():
    assert left(0.0, draining=[True, False, False, False]) == [1, 2, 3]
    assert left(0.0, draining=[True, False, False, False], gpu=[16, 0, 0, 0]) == [0, 1, 2, 3]


def test_what_a_blind_index_says_is_held_keeps_nobody():
    assert left(draining=[True, False, False, False], gpu=[992, 0, 0, 0], trust=[0, 2, 2, 2]) == [1, 2, 3]


def test_when_all_drain_they_take_everything():
    assert left(draining=[True] * 4) == [0, 1, 2, 3]
    assert left(draining=[True] * 4, allowed=[False, True, True, False]) == [1, 2]


def test_a_capped_worker_takes_only_what_it_holds_half_of():
    assert left(cold=[0.0, np.inf, np.inf, 5.0]) == [1, 2, 3]
    assert left(cold=[-900.0, np.inf, np.inf, np.inf], gpu=[496, 0, 0, 0]) == [1, 2, 3]
    assert left(cold=[-900.0, np.inf, np.inf, np.inf], gpu=[512, 0, 0, 0]) == [0, 1, 2, 3]


def test_when_all_are_capped_the_cap_is_ignored():
    assert left(cold=[0.0] * 4) == [0, 1, 2, 3]
    assert left(cold=[0.0] * 4, draining=[True, False, False, False]) == [1, 2, 3]


def test_nobody_stays_nobody():
    assert left(allowed=[False] * 4) == []


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_agrees_with_its_naive_twin(seed):
    rng = np.random.default_rng(seed)
    allowed, draining = rng.random(N) < 0.7, rng.random(N) < 0.5
    trust, cold = rng.integers(0, 3, N), rng.choice([-5.0, 0.0, 3.0, np.inf], N)
    parts = np.sort(rng.integers(0, 63, (4, N)), axis=0) * 16
    gpu, cpu, disk, expected = parts[0], parts[1] - parts[0], parts[2] - parts[1], parts[3]
    hit = [expected[w] - (parts[2][w] if trust[w] == 0 else 0) for w in range(N)]
    stay = [w for w in range(N) if allowed[w] and (not draining[w] or (hit[w] > 0 and hit[w] >= 300))]
    stay = stay or [w for w in range(N) if allowed[w]]
    want = [w for w in stay if cold[w] > 0 or hit[w] >= WARM_HIT * 1000] or stay
    got = left(0.3, allowed=allowed, draining=draining, trust=trust, cold=cold, gpu=gpu, cpu=cpu, disk=disk, expected=expected)
    assert got == want
