"""Decisions, outcomes, load and changes: what is accepted, what is refused, and that the exported JSON Schemas say the same."""

import base64
import json

import numpy as np
import pytest
from pydantic import ValidationError

from schemas.changes import Change
from schemas.export import json_schemas
from schemas.record import END_OF_TIME_S
from schemas.requests import Candidate, Decision, Outcome, pack_hashes, pack_lengths, unpack_hashes, unpack_lengths
from schemas.tables.published import CANDIDATES, REQUESTS, WORKERS
from schemas.workers import Trust, WorkerLoad

DECISION = {
    "version": 1, "request_id": "r", "time_s": 1.0, "router": "a", "pool": "p", "model": "m", "path": "/v1/completions",
    "policy": "cost", "policy_version": "1", "token_source": "exact", "worker": "w",
}  # fmt: skip
LOAD = {"pool": "p", "worker": "w", "rank": 0, "time_s": 1.0, "engine": "vllm", "up": True, "bridge": {"trust": "exact", "epoch": 1}}


def test_hashes_survive_packing():
    hashes = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    assert unpack_hashes(pack_hashes(hashes)).tolist() == hashes.tolist()


@pytest.mark.parametrize("bad", ["no base64!", base64.b64encode(b"1234567").decode()])
def test_a_chain_that_is_no_packed_hashes_is_refused(bad):
    with pytest.raises(ValidationError, match=r"base64 of little-endian u64|whole u64"):
        Decision.model_validate({**DECISION, "chain": bad})


CONTENT = {
    "prompt_tokens": 40, "block_size": 16, "namespace": 2**64 - 1, "content_from": 1, "content": pack_hashes(np.ones(1, np.uint64)),
    "chunks": pack_hashes(np.ones(2, np.uint64)), "chunk_tokens": pack_lengths([20, 4]),
}  # fmt: skip


def test_lengths_survive_packing():
    assert unpack_lengths(pack_lengths([0, 1, 65535])).tolist() == [0, 1, 65535]
    assert Decision.model_validate({**DECISION, **CONTENT}).namespace == 2**64 - 1


@pytest.mark.parametrize("blocks", range(8))
def test_content_of_any_length_fits_its_prompt_and_no_other(blocks):
    content = {**CONTENT, "content_from": 0, "prompt_tokens": 16 * blocks, "content": pack_hashes(np.ones(blocks, np.uint64))}
    content |= {"chunks": pack_hashes(np.ones(2 * blocks, np.uint64)), "chunk_tokens": pack_lengths([8] * 2 * blocks)}
    assert Decision.model_validate({**DECISION, **content}).content_from == 0
    for name, count in (("content", blocks + 1), ("chunks", 2 * blocks + 1)):
        with pytest.raises(ValidationError, match=r"fingerprints for|lengths for"):
            Decision.model_validate({**DECISION, **content, name: pack_hashes(np.ones(count, np.uint64))})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunks": None}, "belong together"),
        ({"namespace": None}, "needs namespace"),
        ({"block_size": None}, "needs namespace, prompt_tokens and block_size"),
        ({"content_from": 3}, "beyond the prompt's 40 tokens"),
        ({"content": pack_hashes(np.ones(2, np.uint64))}, "2 fingerprints for 1 full blocks"),
        ({"chunk_tokens": pack_lengths([24])}, "1 lengths for 2 chunks"),
        ({"chunk_tokens": pack_lengths([20, 5])}, "add up to 24 are expected; they add up to 25"),
        ({"chunk_tokens": pack_lengths([24, 0])}, "positive lengths"),
        ({"chunk_tokens": "AAA="[:3]}, "base64 of little-endian u16"),
        ({"chunk_tokens": "AAAA"}, "whole u16"),
        ({"snippet": "x" * 401}, "at most 400"),
    ],
)
def test_content_that_does_not_fit_its_prompt_is_refused(change, says):
    with pytest.raises(ValidationError, match=says):
        Decision.model_validate({**DECISION, **CONTENT, **change})


def test_unknown_fields_are_ignored_and_unknown_versions_refused():
    assert Decision.model_validate({**DECISION, "from_the_future": 1}).worker == "w"
    with pytest.raises(ValidationError, match="version"):
        Decision.model_validate({**DECISION, "version": 2})


def test_what_is_not_reported_is_null_and_never_zero():
    outcome = Outcome(request_id="r", time_s=1.0)
    assert outcome.cached_tokens is None
    assert (outcome.ttft_s, outcome.retries) == (None, None)
    candidate = Candidate(worker="w", trust=Trust.BLIND)
    assert (candidate.overlap_tokens, candidate.speculative_tokens, candidate.in_flight) == (None, None, None)
    assert Decision.model_validate(DECISION).workers_considered is None
    assert WorkerLoad.model_validate(LOAD).running is None


@pytest.mark.parametrize(
    ("model", "record", "field"),
    [
        (Decision, {**DECISION, "request_id": ""}, "request_id"),
        (Decision, {**DECISION, "time_s": float("nan")}, "time_s"),
        (Decision, {**DECISION, "prompt_tokens": -1}, "prompt_tokens"),
        (Decision, {**DECISION, "token_source": "guess"}, "token_source"),
        (Outcome, {"request_id": "r", "time_s": 1, "status": 99}, "status"),
        (Outcome, {"request_id": "r", "time_s": 1, "ttft_s": -1}, "ttft_s"),
        (WorkerLoad, {**LOAD, "engine": "x"}, "engine"),
        (Change, {"time_s": 1, "text": ""}, "text"),
        (Change, {"time_s": 1e300, "text": "x"}, "time_s"),
        (Change, {"time_s": -1.0, "text": "x"}, "time_s"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(model, record, field):
    with pytest.raises(ValidationError) as e:
        model.model_validate(record)
    assert e.value.errors()[0]["loc"] == (field,)


def nodes(schema, name=""):
    """Every part of a JSON Schema with the name of the field it belongs to."""
    if isinstance(schema, dict):
        yield name, schema
        for key, value in schema.items():
            yield from nodes(value, name if key in ("anyOf", "items", "properties") else key)
    elif isinstance(schema, list):
        for value in schema:
            yield from nodes(value, name)


def test_every_number_is_bounded_by_what_its_published_column_holds():
    """One number beyond that would stop the collector where it writes rows, at every start anew."""
    column_max = {"UTINYINT": 2**8, "USMALLINT": 2**16, "UINTEGER": 2**32, "UBIGINT": 2**64, "DOUBLE": 2**64}
    type_of = {c.name: c.type for table in (WORKERS, CANDIDATES, REQUESTS) for c in table.columns}
    type_of["retries"] = "UINTEGER"  # the collector cuts it to its column
    bounded = times = 0
    for name, part in nodes(json_schemas()):
        if part.get("type") == "integer" and "const" not in part:
            assert part.get("maximum", part.get("exclusiveMaximum")) < column_max[type_of.get(name, "UBIGINT")], name
            bounded += 1
        if part.get("type") == "number" and name == "time_s":
            assert (part["minimum"], part["exclusiveMaximum"]) == (0, END_OF_TIME_S)
            times += 1
    assert bounded > 30 and times == 4
    overlap, _null = Candidate.model_json_schema()["properties"]["overlap_tokens"]["anyOf"]
    assert 2 * overlap["maximum"] < 2**32  # confirmed plus speculative: one column


def test_records_are_frozen_and_survive_json():
    decision = Decision.model_validate({**DECISION, "chain": pack_hashes(np.array([3], np.uint64))})
    assert Decision.model_validate_json(decision.model_dump_json()) == decision
    with pytest.raises(ValidationError):
        decision.worker = "other"
    assert WorkerLoad.model_validate(LOAD).bridge.trust is Trust.EXACT


def test_the_exported_schemas_name_every_field():
    schemas = json.loads(json.dumps(json_schemas()))
    assert set(schemas) == {"decisions", "outcomes", "worker-load", "changes"}
    assert set(schemas["decisions"]["properties"]) == set(Decision.model_fields)
    assert schemas["outcomes"]["required"] == ["request_id", "time_s"]
    required = {"request_id", "time_s", "router", "pool", "model", "path", "policy", "policy_version", "token_source", "worker"}
    assert set(schemas["decisions"]["required"]) == required, "all that came later may be left out by other routers"
