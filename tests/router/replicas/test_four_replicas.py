"""Four replicas over real sockets and simulated workers: together they route as one that sees every request does, nearly.

Figures of the runs are in router/replicas/README.md. Virtual time; the sockets are real, and each 20 ms all that was told has arrived."""

import pytest

from tests.router.replicas.agents import Result, Run


@pytest.mark.timeout(150)
async def test_four_replicas_keep_at_least_95_percent_of_one_replicas_hit_rate(tmp_path, record_property):
    async def measured(replicas: int, exchange: bool) -> Result:
        return await Run(replicas, exchange, str(tmp_path), sessions=60, seed=3).result()

    one, four, apart = await measured(1, False), await measured(4, True), await measured(4, False)
    for name, result in (("one", one), ("four", four), ("four, each for itself", apart)):
        record_property(name, f"hit rate {result.hit_rate:.4f}, mean TTFT {result.mean_ttft_s:.3f} s, {result.requests} requests")
    assert four.requests == one.requests == apart.requests
    assert four.hit_rate >= 0.95 * one.hit_rate
    assert four.hit_rate > apart.hit_rate  # what the messages are for
    assert four.gaps == 0
