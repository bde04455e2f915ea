import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.counted import Counted, Measured

BUCKETS = (25e-6, 1e-3, 0.5, 1, 30)


def samples(page):
    return sorted(line for line in page.decode().splitlines() if "_created" not in line)


def test_pages_are_those_of_prometheus_client():
    ours, theirs, rng = CollectorRegistry(), CollectorRegistry(), random.Random(1)
    counted, counter = (
        Counted(ours, "requests", "what", ["pool", "status"]),
        Counter("requests", "what", ["pool", "status"], registry=theirs),
    )
    measured, histogram = (
        Measured(ours, "ttft", "how long", BUCKETS, ["pool"]),
        Histogram("ttft", "how long", ["pool"], buckets=BUCKETS, registry=theirs),
    )
    bare, bare_histogram = Measured(ours, "bare", "how long", BUCKETS), Histogram("bare", "how long", buckets=BUCKETS, registry=theirs)
    assert samples(generate_latest(ours)) == samples(generate_latest(theirs))
    for _ in range(200):
        pool, status, seconds = rng.choice(["a", 'b"\n']), rng.choice(["2xx", "left"]), rng.choice([*BUCKETS, 0.0, 0.25, 100.0])
        counted.by[pool, status] += 2
        counter.labels(pool, status).inc(2)
        measured.observe(seconds, (pool,))
        histogram.labels(pool).observe(seconds)
        bare.observe(seconds)
        bare_histogram.observe(seconds)
    assert samples(generate_latest(ours)) == samples(generate_latest(theirs))
    assert b'requests_total{pool="a",status="2xx"}' in generate_latest(ours)
