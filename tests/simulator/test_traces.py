"""The trace readers: counts and prefix structure of the public files against numbers computed elsewhere; what is broken names its place."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.traces import PARTS, BadTrace, claude_code, lmcache_agents, mooncake, ragpulse
from tests.public_traces import expected, trace


def write(path: Path, *lines: Any) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}
TURN = {"t": 3.5, "type": "s", "model": "m", "in": 200, "out": 5, "hash_runs": [[1, 2], [7, 1]], "ttft": 0.5}
AGENT = {"t": 4.0, "type": "subagent", "agent_id": "a", "subagent_type": "explore", "requests": [TURN | {"t": 0.0, "hash_runs": [[1, 3]]}]}
SESSION = {"id": "s", "block_size": 64, "tool_tokens": 10, "system_tokens": 20, "requests": [TURN, AGENT, TURN | {"think_time": 2.0}]}


def test_a_mooncake_line_becomes_a_request(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        (r,) = mooncake(write(tmp_path / name, MOONCAKE, ""))
        assert (r.arrival_s, r.input_tokens, r.output_tokens, r.block_ids.tolist(), r.full_blocks) == (1.5, 600, 7, [4, 9], 1)


def test_a_session_has_its_turns_and_its_agents_in_the_files_order(tmp_path: Path) -> None:
    first, second = claude_code(write(tmp_path / "c.jsonl", SESSION, SESSION | {"id": "s2"}))
    assert [t.block_ids().tolist() for t in first.in_file_order()] == [[1, 2, 7], [1, 2, 3], [1, 2, 7]]
    assert [(t.streamed, t.ttft_s, t.think_s, t.api_s) for t in first.turns] == [(True, 0.5, None, None), (True, 0.5, 2.0, None)]
    assert [(a.agent_id, a.kind, a.starts_s, a.after_turns) for a in first.agents] == [("a", "explore", 4.0, 1)]
    assert second.base == 8
    assert second.turns[0].block_ids(second.base).tolist() == [9, 10, 15]


def test_a_rag_prompt_is_its_segments_in_order(tmp_path: Path) -> None:
    for n, (name, key) in enumerate([("1_sys_prompt", "sys_prompt_id"), ("2_passages", "passage_id"), ("3_history", "history_id")]):
        write(tmp_path / f"{name}.jsonl", {key: 10 * n, "token_length": n + 1}, "")
    write(tmp_path / "4_user_input.jsonl", {"user_input_id": 30, "token_length": 4})
    write(tmp_path / "5_web_search.jsonl", {"web_search_id": 40, "token_length": 5})
    ids = {"sys_prompt": [0], "passages_ids": [10], "history": [20], "web_search": [], "user_input": [30]}
    line = {"timestamp": "82", "input_length": 12, "output_length": 1, "hash_ids": ids, "session_id": "x"}
    (r,) = ragpulse_of(tmp_path, line)
    assert (r.arrival_s, r.segment_ids.tolist(), r.segment_tokens.tolist()) == (82.0, [0, 10, 20, 30], [1, 2, 3, 4])
    assert [PARTS[p] for p in r.segment_parts] == ["sys_prompt", "passages_ids", "history", "user_input"]
    with pytest.raises(BadTrace, match=r"0_trace.jsonl:1: segments without a length: \[77\]"):
        ragpulse_of(tmp_path, line | {"hash_ids": {"history": [77]}})


def ragpulse_of(folder: Path, *lines: Any) -> list[Any]:
    write(folder / "0_trace.jsonl", *lines)
    return ragpulse(folder)


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_texts_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    def line(us: int, session: str) -> str:
        return json.dumps({"timestamp": us, "session_id": session, "input": f"in {us}", "output": "out"}) + "\n"

    path = archive(
        tmp_path / "t.tar.xz", {"miniswe/a.jsonl": line(3_000_000, "a") + line(5_000_000, "a"), "miniswe/b.jsonl": line(4_500_000, "b")}
    )
    got = lmcache_agents(path, ("miniswe",))["miniswe"]
    assert [(r.time_s, r.session_id, r.prompt) for r in got] == [
        (3.0, "a", "in 3000000"),
        (4.5, "b", "in 4500000"),
        (5.0, "a", "in 5000000"),
    ]
    with pytest.raises(BadTrace, match="no folder taubench"):
        lmcache_agents(path, ("miniswe", "taubench"))
    with pytest.raises(BadTrace, match=r"t.tar.xz:miniswe/a.jsonl:1: input must be a str"):
        lmcache_agents(archive(path, {"miniswe/a.jsonl": '{"timestamp": 1, "session_id": "x"}'}), ("miniswe",))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "a.jsonl:2: no JSON"),
        ("[]", "a.jsonl:2: no JSON object"),
        (MOONCAKE | {"timestamp": None}, "a.jsonl:2: timestamp must be a number"),
        (MOONCAKE | {"output_length": -1}, "a.jsonl:2: output_length must be a whole number"),
        (MOONCAKE | {"hash_ids": [1]}, "a.jsonl:2: 1 hash_ids for 600 tokens"),
        ({}, "a.jsonl:2: input_length must be"),
    ],
)
def test_a_broken_line_names_its_place(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(BadTrace, match=why):
        mooncake(write(tmp_path / "a.jsonl", MOONCAKE, line))


def test_a_broken_turn_names_its_place_inside_the_session(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"c.jsonl:1, requests\[0\]: hash_runs name 3 blocks for 500 tokens"):
        claude_code(write(tmp_path / "c.jsonl", SESSION | {"requests": [TURN | {"in": 500}]}))
    with pytest.raises(BadTrace, match=r"c.jsonl:1, requests\[0\], requests\[0\]: model must be a str"):
        claude_code(write(tmp_path / "c.jsonl", SESSION | {"requests": [AGENT | {"requests": [TURN | {"model": 3}]}]}))


def test_a_file_that_is_not_there_or_cut_short_is_a_bad_trace(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="nowhere"):
        mooncake(tmp_path / "nowhere.jsonl")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() * 50)[:-9])
    with pytest.raises(BadTrace, match="cut"):
        mooncake(cut)


@pytest.mark.traces
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_mooncake_has_the_published_counts(name: str) -> None:
    want = expected(f"mooncake_{name}")
    got = mooncake(trace(f"mooncake-fast25/{name}_trace.jsonl.gz"))
    assert len(got) == want["requests"]
    assert sum(r.input_tokens for r in got) == want.get("input_tokens")
    assert round(np.mean([r.output_tokens for r in got]), 2) == want["mean_output"]
    assert max(r.arrival_s for r in got) == want["last_timestamp_ms"] / 1000
    ids = np.concatenate([r.block_ids for r in got])
    assert (len(ids), len(np.unique(ids))) == (want["block_refs"], want["unique_blocks"])
    seen: set[int] = set()
    hit = 0
    for r in got:
        k = 0
        while k < len(r.block_ids) and int(r.block_ids[k]) in seen:
            k += 1
        hit += min(r.input_tokens, k * want["block"])
        seen.update(r.block_ids.tolist())
    assert hit / want["input_tokens"] == pytest.approx(want["ideal_token_hit"], abs=1e-6)


@pytest.mark.traces
def test_claude_code_has_the_published_counts() -> None:
    want = expected("claude_code_710")
    got = claude_code(trace("kv-cache-tester-claude-code/claude_code_710.runs.jsonl.gz"))
    turns = [t for s in got for t in s.in_file_order()]
    assert (len(got), len(turns), sum(len(s.agents) for s in got)) == (want["sessions"], want["requests"], want["subagents"])
    assert sum(t.input_tokens for t in turns) == want["input_tokens"]
    assert sum(t.blocks for t in turns) == want["block_refs"]
    assert sum(t.ttft_s is not None for t in turns) == want["requests_with_ttft"]
    seen = np.zeros(got[-1].base + 100_000, np.bool_)
    shared = 0
    for s in got:
        assert not seen[s.base + 1 :].any()
        for t in s.in_file_order():
            ids = t.block_ids(s.base)
            new = np.flatnonzero(~seen[ids])
            shared += len(ids) if not len(new) else int(new[0])
            seen[ids] = True
    assert int(seen.sum()) == want["unique_blocks_session_local"]
    assert shared * want["block"] / want["input_tokens"] == pytest.approx(want["ideal_token_hit_session_local"], abs=1e-6)


@pytest.mark.traces
def test_ragpulse_has_the_published_counts() -> None:
    want = expected("ragpulse")
    got = ragpulse(trace("ragpulse"))
    assert (len(got), len({r.session_id for r in got})) == (want["requests"], want["sessions"])
    assert sum(int(r.segment_tokens.sum()) for r in got) == want["segment_tokens"]
    assert max(r.arrival_s for r in got) - min(r.arrival_s for r in got) == want["span_s"]
    by_position = [{int(r.segment_ids[n]) for r in got} for n in range(3)]
    assert [len(ids) for ids in by_position] == want["sys_prompt_distinct_ids_by_position"]
    assert list(PARTS) == want["order"]


@pytest.mark.traces
def test_the_agent_texts_have_the_published_counts() -> None:
    got = lmcache_agents(trace("lmcache-agent-trace/lmcache_agent_trace.tar.xz"))
    want = expected("divergence_text")
    assert {name: len(r) for name, r in got.items()} == {name: want[name]["requests"] for name in ("miniswe", "magagent", "taubench")}
    seen: set[int] = set()
    shared = total = 0
    for r in got["miniswe"]:
        cut = [r.prompt[: at + 64] for at in range(0, len(r.prompt) - 63, 64)]
        chain = [hash(c) for c in cut]
        known = next((n for n, c in enumerate(chain) if c not in seen), len(chain))
        shared, total = shared + known * 64, total + len(r.prompt)
        seen.update(chain)
    assert shared / total == pytest.approx(want["miniswe"]["prefix_hit"], abs=5e-4)
