"""The forecast at dispatch on the recorded vLLM runs: from the events that were out when each request was sent."""

import random
from collections import Counter

import pytest

from collector.bridge.recorded import read_frames, replay_frames
from router.index.prefix_index import EXACT
from router.policy.cost import Coefficients, most_cached_tokens
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from router.prompts.reader import local_ids
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import WorkerId, decode
from tests.router.recordings import FIXTURES, TOKENIZER, expected, requests_of

KEY = HashKey(7, 9)
BLOCK = 32


def forecasts(folder, lines):
    """(line, forecast in tokens) of every request of a run that reported its cached tokens, in order of sending."""
    ranks = 2 if folder.startswith("d-") else 1
    fleet = Fleet(pools=(Pool(name="tiny"),), workers=(Worker(pool="tiny", name="w", url="http://w:1", ranks=ranks),))
    pools = Pools(fleet, {}, "cost", Coefficients(), KEY, TrustRules(1e12, 1e12), random.Random(1))
    pool = pools.by_name["tiny"]
    pool.learn_block_size(BLOCK)
    batches = []
    for rank in range(ranks):
        name = f"frames_rank{rank}.jsonl.gz" if ranks > 1 else "frames.jsonl.gz"
        records = replay_frames(read_frames(FIXTURES / folder / name), WorkerId("tiny", "w", rank), KEY, batch_s=0)
        batches += [decode(r) for r in records]
    batches.sort(key=lambda b: b.bridge_time_s)
    tokenizer = LocalTokenizer.from_dir(TOKENIZER)
    recorded = requests_of(folder)
    at = 0
    reported = [x for x in lines if x["cached_tokens"] is not None]
    for line in sorted(reported, key=lambda x: recorded[x["index"]]["t_start"]):
        request = recorded[line["index"]]
        while at < len(batches) and batches[at].bridge_time_s <= request["t_start"]:
            pools.index.apply(batches[at], 0.0)
            at += 1
        ids = local_ids(tokenizer, request["request"])
        prompt = Prompt("exact", len(ids), len(ids), pool.chain(ids, None, request["request"].get("cache_salt")), BLOCK)
        others = {t.number for t in pool.targets if t.rank != line["rank"]}
        decided = pools.decide(pool, prompt, others, 0.0)
        assert decided.target.rank == line["rank"]
        confirmed = int(decided.now.held[decided.target.number])
        yield line, min(confirmed, most_cached_tokens(len(ids), BLOCK))
    assert all(pools.index.trust[s.number] == EXACT for s in pools.index.slots)
    assert pools.index.unknown_removals == 0


@pytest.fixture(scope="module")
def all_forecasts():
    lines = expected()
    return [x for folder in sorted({e["folder"] for e in lines}) for x in forecasts(folder, [e for e in lines if e["folder"] == folder])]


def test_the_forecast_at_dispatch_is_right_for_157_of_167_the_known_limit(all_forecasts):
    assert len(all_forecasts) == 167
    assert sum(forecast == line["cached_tokens"] for line, forecast in all_forecasts) == 157


def test_the_ten_wrong_forecasts_are_those_that_no_event_could_have_told(all_forecasts):
    wrong = [line for line, forecast in all_forecasts if forecast != line["cached_tokens"]]
    assert all(forecast == line["predicted_at_start"] for line, forecast in all_forecasts)
    assert sorted(Counter(line["reason_at_start"] for line in wrong).values()) == [5, 5]
    assert None not in {line["reason_at_start"] for line in wrong}
