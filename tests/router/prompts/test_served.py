import contextlib
import random
from types import SimpleNamespace

import pytest

from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.served import ServedModels
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool
from simulator.mock_worker import MockWorker
from simulator.settings import MockEngineSettings
from tests.router.running import running, until


@pytest.mark.parametrize(
    ("cards", "served"),
    [
        ([], None),
        ([{"object": "model"}], None),
        ([{"id": "m"}], ServedModels(frozenset({"m"}), frozenset(), None)),
        (
            [{"id": "m", "parent": None, "max_model_len": 8}, {"id": "alias", "max_model_len": 4}, {"id": "fine", "parent": "m"}],
            ServedModels(frozenset({"m", "alias"}), frozenset({"fine"}), 4),
        ),
    ],
)
def test_what_a_list_of_models_says(cards, served):
    assert ServedModels.of(cards) == served


def test_names_that_workers_serve_lead_to_their_pool_and_only_adapters_change_the_names_of_blocks():
    fleet = Fleet(pools=(Pool(name="a"), Pool(name="b")))
    pools = Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(1))
    pools.by_name["b"].served = ServedModels(frozenset({"b-real", "alias"}), frozenset({"fine"}), 8)

    def found(model):
        pool = pools.for_model(model)
        return pool and (pool[0].name, pool[1])

    assert [found(m) for m in ("a", "b", "alias", "fine", "other")] == [("a", None), ("b", None), ("b", None), ("b", "fine"), None]


async def test_an_adapter_that_the_worker_lists_is_routed_under_its_own_names():
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(MockWorker(MockEngineSettings(port=0, instant=True, model="tiny", lora=["fine"])))
        r = await stack.enter_async_context(running([SimpleNamespace(name="w0", url=worker.url)]))
        pool = r.router.pools.by_name["tiny"]
        await until(lambda: pool.served is not None)
        assert pool.served == ServedModels(frozenset({"tiny"}), frozenset({"fine"}), worker.engine.max_model_len)
        for model in ("tiny", "fine"):
            await r.post({"model": model, "prompt": list(range(5, 60)), "max_tokens": 1})
        (base, adapter), _ = await r.records(2)
        assert (base.lora, adapter.lora) == (None, "fine")
        assert base.chain != adapter.chain
        async with r.client.get(r.url + "/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["tiny", "fine"]
