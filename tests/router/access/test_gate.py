"""The gate by itself: who comes in, what the file may change meanwhile, and that everything taken is given back."""

import asyncio
import contextlib
import hashlib

import pytest

from router.access.gate import Gate, visit_of
from router.access.refusal import Refused
from schemas.settings import SettingsError


def entry(name, key=None, more=""):
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256((key or name).encode()).hexdigest()}"\n{more}\n'


def scope(key=None, path="/v1/completions"):
    return {"type": "http", "path": path, "headers": [] if key is None else [(b"authorization", f"Bearer {key}".encode())]}


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(entry("a", more="max_in_flight = 1") + entry("b", more='tenant = "team"\nmodels = ["m"]'))
    return path


def replace(file, text):
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


@contextlib.asynccontextmanager
async def followed(gate):
    task = asyncio.create_task(gate.follow(0.01))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds):
    while not holds():  # noqa: ASYNC110 - the suite's time-out is the deadline
        await asyncio.sleep(0.005)


def refusal(gate, asked):
    with pytest.raises(Refused) as refused:
        gate.enter(asked)
    return refused.value


def test_without_a_file_all_come_in_and_say_whose_they_are():
    gate = Gate(None)
    assert gate.is_open
    visit = gate.enter(scope())
    assert (visit.tenant, visit.caller, visit.headers(), visit.may_use("any")) == (None, None, [], True)
    visit.use("any")
    visit.spend(10**9)
    visit.leave()
    assert gate.knows(scope())


def test_with_a_file_the_key_tells_the_tenant(file):
    gate = Gate(file)
    asked = scope("b")
    assert gate.enter(asked).tenant == "team"
    assert visit_of(asked).caller.name == "b"
    assert refusal(gate, scope()).reason == "no_key"
    assert refusal(gate, scope("c")).reason == "unknown_key"
    assert dict(gate.refusals) == {"no_key": 1, "unknown_key": 1}


def test_health_is_open_and_metrics_only_by_setting(file):
    gate = Gate(file)
    for path in ("/healthz", "/readyz"):
        assert gate.enter(scope(path=path)).caller is None
    assert refusal(gate, scope(path="/metrics")).reason == "no_key"
    assert gate.enter(scope("a", "/metrics")).caller.name == "a"
    assert Gate(file, open_metrics=True).enter(scope(path="/metrics")).caller is None
    assert not gate.knows(scope())
    assert not gate.knows(scope("c"))
    assert gate.knows(scope("a"))
    assert not gate.refusals["unknown_key"]


def test_a_key_is_for_its_models(file):
    gate = Gate(file)
    visit = gate.enter(scope("b"))
    visit.use("m")
    with pytest.raises(Refused) as refused:
        visit.use("other")
    assert (refused.value.status, refused.value.reason) == (403, "model")
    assert not visit.may_use("other")
    assert gate.enter(scope("a")).may_use("other")


def test_a_place_is_given_back_once(file):
    gate = Gate(file)
    visit = gate.enter(scope("a"))
    assert refusal(gate, scope("a")).reason == "in_flight"
    assert gate.enter(scope("a", "/metrics"))  # takes no place
    visit.leave()
    visit.leave()
    assert gate.in_flight == {"a": 0}
    gate.enter(scope("a")).leave()
    assert gate.in_flight == {"a": 0}


def test_a_key_over_its_rate_is_told_when_to_come_again(file):
    clock = Clock()
    replace(file, entry("a", more="requests_per_minute = 1\ntokens_per_minute = 60"))
    gate = Gate(file, clock=clock)
    visit = gate.enter(scope("a"))
    visit.spend(90)
    clock.now_s += 20
    refused = refusal(gate, scope("a"))
    assert (refused.status, refused.reason, refused.retry_after_s) == (429, "requests", pytest.approx(40))
    assert dict(refused.answer_headers())[b"x-ratelimit-remaining-requests"] == b"0"
    clock.now_s += 40
    late = gate.enter(scope("a"))
    late.spend(1000)
    with pytest.raises(Refused) as e:
        visit.spend(1)
    assert (e.value.reason, e.value.status) == ("tokens", 429)
    assert (gate.requests["a"], gate.tokens["a"]) == (2, 1090)


def test_an_expired_key_is_refused(file):
    replace(file, entry("a", more="expires = 2001-09-09T01:46:40Z"))
    wall = Clock()
    gate = Gate(file, wall_clock=wall)
    wall.now_s = 1e9 - 1
    gate.enter(scope("a"))
    wall.now_s = 1e9
    assert refusal(gate, scope("a")).reason == "expired_key"


async def test_a_changed_file_counts_from_the_next_request_on(file, caplog):
    caplog.set_level("INFO")
    gate = Gate(file)
    staying, going = gate.enter(scope("a")), gate.enter(scope("b"))
    async with followed(gate):
        replace(file, entry("a", more="max_in_flight = 2") + entry("c"))
        await until(lambda: not gate.knows(scope("b")))
        gate.enter(scope("c"))
        gate.enter(scope("a"))
        assert refusal(gate, scope("a")).reason == "in_flight"  # the first visit still counts
        staying.leave()
        going.leave()
        assert gate.in_flight == {"a": 1, "c": 1}
        assert "b" not in gate.requests
    assert "2 keys" in caplog.text


async def test_a_broken_file_changes_nothing_and_says_so(file):
    gate = Gate(file)
    async with followed(gate):
        for text in ("", "[[keys]]\nname = 1\nsha256 = 'ww-secret'", "keys"):
            replace(file, text)
            await until(lambda: gate.trouble is not None)
            assert "ww-secret" not in gate.trouble
            gate.enter(scope("b"))
            replace(file, entry("b"))
            await until(lambda: gate.trouble is None)
        file.unlink()
        await until(lambda: gate.trouble is not None)
        gate.enter(scope("b"))


async def test_a_file_that_could_not_be_read_is_tried_again_and_told_once(file, monkeypatch, caplog):
    gate = Gate(file)
    tried = 0

    def unreadable(path):
        nonlocal tried
        tried += 1
        raise SettingsError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("router.access.gate.load_keys", unreadable)
        async with followed(gate):
            replace(file, entry("b"))
            await until(lambda: tried >= 3)
            gate.enter(scope("a"))
            patch.undo()
            await until(lambda: gate.trouble is None)
    assert refusal(gate, scope("a")).reason == "unknown_key"
    assert caplog.text.count("too many open files") == 1


def test_a_broken_file_at_the_start_stops_it(tmp_path):
    with pytest.raises(SettingsError, match="api_keys_file"):
        Gate(tmp_path / "none.toml")
