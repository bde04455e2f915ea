import numpy as np

from router.policy.cold import ColdCaps


def test_a_new_worker_gets_so_many_tokens_a_second_and_one_prompt_beyond():
    caps = ColdCaps(1000.0, 60.0)
    given, worker = 0.0, 2
    for step in range(1000):
        now_s = step * 0.01
        if caps.left(4, [worker], now_s)[worker] > 0:
            caps.take(worker, 300, now_s)
            given += 300
    assert 10 * 1000 <= given <= 11 * 1000 + 300


def test_a_long_prompt_is_owed():
    caps = ColdCaps(1000.0, 60.0)
    caps.left(1, [0], 0.0)
    caps.take(0, 5000, 0.0)
    assert caps.left(1, [0], 3.9)[0] < 0
    assert caps.left(1, [0], 4.1)[0] > 0


def test_who_is_not_new_has_no_cap_and_no_memory_of_one():
    caps = ColdCaps(1000.0, 60.0)
    caps.left(2, [1], 0.0)
    caps.take(1, 9000, 0.0)
    assert np.isinf(caps.left(2, [], 1.0)).all()
    caps.take(1, 9000, 1.0)
    assert caps.left(2, [1], 2.0)[1] == 1000.0


def test_zero_is_no_cap():
    assert np.isinf(ColdCaps(0.0, 60.0).left(2, [0, 1], 0.0)).all()
