"""Workers found by DNS or in a Kubernetes endpoints file, as kubectl writes it."""

import asyncio
import json
import socket

import pytest

from router.workers.discovery import MOST_WORKERS, NotFound, find, parse_endpoints
from schemas.discover import parse_discover

FILE = parse_discover("file:///x")


def names(found):
    return [w.name for w in found.workers]


def endpoint(ip, **conditions):
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "name": f"pod-{ip}"}}


def endpoint_slice(*endpoints, ports=({"name": "http", "port": 8000, "protocol": "TCP"},), family="IPv4"):
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "coder-abc", "labels": {"kubernetes.io/service-name": "coder"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": list(ports),
    }


def list_of(*items):
    return {"apiVersion": "v1", "kind": "List", "items": list(items), "metadata": {"resourceVersion": ""}}


def test_ready_and_unknown_pods_are_found_and_those_that_end_are_draining():
    content = list_of(
        endpoint_slice(
            endpoint("10.0.0.2", ready=True, serving=True, terminating=False),
            endpoint("10.0.0.1"),
            endpoint("10.0.0.3", ready=False, serving=True, terminating=True),
            endpoint("10.0.0.4", ready=False, serving=False, terminating=False),
            endpoint("10.0.0.5", ready=False, serving=False, terminating=True),
        ),
        endpoint_slice(endpoint("10.0.0.9", ready=True), endpoint("10.0.0.3", ready=False)),
    )
    found = parse_endpoints("coder", FILE, content)
    assert names(found) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.9:8000"]
    assert (found.draining, {w.pool for w in found.workers}) == ({"10.0.0.3:8000"}, {"coder"})


def test_endpoints_of_the_older_kind_are_read_too():
    content = {
        "kind": "EndpointsList",
        "items": [
            {
                "metadata": {"name": "coder"},
                "subsets": [{"addresses": [{"ip": "10.0.0.1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}], "ports": [{"port": 8000}]}],
            },
            {"metadata": {"name": "none"}},
        ],
    }
    assert names(parse_endpoints("coder", FILE, content)) == ["10.0.0.1:8000"]


def test_a_list_of_urls_and_options_that_hold_for_each():
    discover = parse_discover("file:///x?engine=sglang&ranks=4&hardware=h100")
    found = parse_endpoints("coder", discover, ["http://a:1", "https://b:2", "http://a:1"])
    assert [(w.url, w.engine, w.ranks, w.hardware) for w in found.workers] == [
        ("http://a:1", "sglang", 4, "h100"), ("https://b:2", "sglang", 4, "h100"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("port", "ports", "found"),
    [
        ("", [{"name": "a", "port": 1}], "1"),
        ("?port=b", [{"name": "a", "port": 1}, {"name": "b", "port": 2}], "2"),
        ("?port=9", [{"name": "a", "port": 1}, {"name": "b", "port": 2}], "9"),
        ("?port=9", None, "9"),
    ],
)
def test_the_port_is_the_one_that_is_meant(port, ports, found):
    content = endpoint_slice(endpoint("10.0.0.1"), ports=ports or ())
    assert names(parse_endpoints("p", parse_discover("file:///x" + port), content)) == [f"10.0.0.1:{found}"]


def test_a_dual_stack_pod_is_one_worker_and_an_ipv6_one_is_found_too():
    six = endpoint_slice(endpoint("fd00::1"), family="IPv6")
    assert names(parse_endpoints("p", FILE, list_of(endpoint_slice(endpoint("10.0.0.1")), six))) == ["10.0.0.1:8000"]
    (worker,) = parse_endpoints("p", FILE, list_of(six)).workers
    assert worker.url == "http://[fd00::1]:8000"


def test_no_endpoints_is_a_word_too():
    assert parse_endpoints("p", FILE, list_of()).workers == ()
    assert parse_endpoints("p", FILE, list_of({**endpoint_slice(), "endpoints": None, "ports": None})).workers == ()
    assert parse_endpoints("p", FILE, []).workers == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"kind": "Service"}, "kind 'Service'; there should be EndpointSlice"),
        ({"items": []}, "is no list of urls"),
        (7, "is no list of urls"),
        ([7], "is no list of urls"),
        (["gpu:1"], "must be an http"),
        (list_of({"kind": "EndpointSlice", "endpoints": [{}], "ports": [{"port": 1}]}), "KeyError: 'addresses'"),
        (endpoint_slice(endpoint("10.0.0.1"), ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}]), r"a: 1, b: 2\): say which"),
        (endpoint_slice(endpoint("10.0.0.1"), ports=[{"name": "a"}]), "say which"),
        (endpoint_slice(*(endpoint(f"10.0.{n >> 8}.{n & 255}") for n in range(MOST_WORKERS + 1))), "1025 workers"),
        ([f"http://x:{n}" for n in range(MOST_WORKERS + 1)], "1025 workers"),
        (endpoint_slice(endpoint("no host!")), "is wrong|must be"),
        (["http://user:pass@gpu:99999"], r"a worker 'http://gpu:99999' is wrong"),
    ],
)
def test_what_makes_no_sense_is_said(content, says):
    with pytest.raises(NotFound, match=says):
        parse_endpoints("p", FILE, content)


async def test_a_file_is_read_and_what_is_wrong_with_it_names_it(tmp_path):
    file = tmp_path / "endpoints.json"
    discover = parse_discover(f"file://{file}")
    with pytest.raises(NotFound, match=r"endpoints\.json cannot be read: No such file"):
        await find("p", discover)
    file.write_text('["http://a:1"')
    with pytest.raises(NotFound, match=r"endpoints\.json is no JSON"):
        await find("p", discover)
    file.write_text("{}")
    with pytest.raises(NotFound, match=r"endpoints\.json: is no list"):
        await find("p", discover)
    file.write_text(json.dumps(list_of(endpoint_slice(endpoint("10.0.0.1")))))
    assert names(await find("p", discover)) == ["10.0.0.1:8000"]


async def test_each_address_of_a_name_is_a_worker(monkeypatch):
    async def two(host, port, *, type):
        assert (host, type) == ("coder", socket.SOCK_STREAM)
        return [(2, 1, 6, "", (ip, port)) for ip in ("10.0.0.2", "10.0.0.1", "10.0.0.2")] + [(10, 1, 6, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
    assert names(await find("p", parse_discover("dns://coder:8000"))) == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_this_machines_own_name_is_resolved():
    assert "127.0.0.1:8000" in names(await find("p", parse_discover("dns://127.0.0.1:8000")))


async def test_a_name_without_addresses_says_nothing_about_the_workers(monkeypatch):
    async def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    with pytest.raises(NotFound, match="the name coder has no addresses: Name or service not known"):
        await find("p", parse_discover("dns://coder:8000"))
