"""What can be said about the data itself: the rows of `data_health`, each with a sentence that says what it means and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collector.fold import Fold
from collector.standing import Standing
from collector.store.columns import micros
from schemas.stream import Partition
from schemas.workers import Trust

LAG_WARN_RECORDS = 10_000
LAG_WARN_S = 30.0
LOAD_STALE_S = 10.0
MAX_NAMED = 5
AGREE_S, DISAGREE_WARN, DISAGREE_BAD = 300.0, 0.02, 0.10
KEY_SEEN_S = 300.0
MISSING_WARN_SHARE = 0.01
NOT_YET = "not connected yet"


@dataclass(slots=True)
class Health:
    """What the loop knows about itself; it writes, the checks and the metrics read."""

    state: str = "running"
    reason: str = ""
    stream_trouble: str = NOT_YET
    lag: dict[Partition, int] = field(default_factory=dict)
    publish_s: float = 0.0
    commit_s: float = 0.0
    published_at_s: float = 0.0
    publish_trouble: str = ""
    rebuilding: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    area: str
    subject: str
    name: str
    value: float | None
    unit: str
    status: str
    detail: str

    def row(self, now_s: float) -> tuple[object, ...]:
        return self.area, self.subject, self.name, self.value, self.unit, self.status, self.detail, micros(now_s)


def checks(
    fold: Fold,
    health: Health,
    standings: Sequence[Standing],
    stream_time_s: Mapping[Partition, float],
    memory_bytes: int,
    now_s: float,
) -> list[Check]:
    """standings: by worker number."""
    return [
        *_collector(fold, health, memory_bytes),
        *_stream(fold, health, stream_time_s, now_s),
        *_join(fold),
        *_hash_keys(fold, standings, now_s),
        _events_agree(fold, now_s),
        *_workers(fold, standings, now_s),
    ]


def _collector(fold: Fold, h: Health, memory_bytes: int) -> list[Check]:
    c = fold.counters
    paused = h.state == "paused"
    dead = c["dead_letters"]
    state = "bad" if paused else "warn" if h.rebuilding else "ok"
    says = h.reason if paused else "State is being rebuilt from the stream after a restart." if h.rebuilding else "Reading and writing."
    held = int(fold.residency.workers["resident"].sum())
    return [
        Check("collector", "", "state", None, "", state, says),
        Check("collector", "", "publish_s", h.publish_s, "s", "warn" if h.publish_s > 0.5 else "ok", "Time to publish the last file."),
        Check("collector", "", "commit_s", h.commit_s, "s", "warn" if h.commit_s > 1 else "ok", "Time that the last commit took."),
        Check("collector", "", "memory_bytes", memory_bytes, "bytes", "ok", "Memory of the collector's process."),
        Check("collector", "", "dead_letters", dead, "records", "warn" if dead else "ok",
              "Records that could not be used; the table dead_letters says why." if dead else "Every record could be used."),
        Check("collector", "", "resident_blocks", held, "blocks", "ok", "Blocks that all workers hold, from events."),
    ]  # fmt: skip


def _stream(fold: Fold, h: Health, stream_time_s: Mapping[Partition, float], now_s: float) -> list[Check]:
    out = [
        Check("stream", "", "connected", None, "", "bad" if h.stream_trouble else "ok",
              f"Tried again by itself: {h.stream_trouble}" if h.stream_trouble else "The stream is read."),
    ]  # fmt: skip
    lost = fold.counters["stream_lost_records"]
    if fold.counters["stream_gaps"]:
        out.append(
            Check("stream", "", "lost_records", lost, "records", "bad",
                  "The stream lost records before they were read, or a topic was made anew; the table changes says when and which.")
        )  # fmt: skip
    by_topic: dict[str, list[tuple[int, int, float]]] = {}
    for (topic, partition), lag in sorted(h.lag.items()):
        at_s = stream_time_s.get((topic, partition))
        by_topic.setdefault(topic, []).append((partition, lag, max(0.0, now_s - at_s) if lag and at_s is not None else 0.0))
    for topic, parts in by_topic.items():
        stalled = [p for p in parts if p[1] > LAG_WARN_RECORDS or p[2] > LAG_WARN_S]
        text = f"Records not read yet; the oldest is {max(age_s for _, _, age_s in parts):.1f} s old at most."
        if stalled:
            named = ", ".join(f"{p} ({lag} records, {age_s:.0f} s)" for p, lag, age_s in stalled[:MAX_NAMED])
            more = f" and {len(stalled) - MAX_NAMED} more" if len(stalled) > MAX_NAMED else ""
            text += f" Behind is partition {named}{more}: does the collector have enough CPU, is the stream slow?"
        out.append(Check("stream", topic, "lag_records", sum(p[1] for p in parts), "records", "warn" if stalled else "ok", text))
    return out


def _join(fold: Fold) -> list[Check]:
    c = fold.counters
    outcomes = max(1, c["records/outcomes"])
    rows = [
        Check(
            "join",
            "",
            "open_requests",
            len(fold.join.open),
            "requests",
            "ok",
            "Requests in flight, or ended so lately that their hit is not told yet.",
        )
    ]
    for name, sentence in (
        ("outcome_missing", "Decisions whose outcome never came: did a router die, or its outcomes get lost?"),
        ("decision_missing", "Outcomes whose decision never came: does every router write decisions?"),
        ("late/decision", "Decisions that came after their request was closed; they are in dead_letters."),
        ("late/outcome", "Outcomes that came after their request was closed; they are in dead_letters."),
        ("duplicate/decision", "Decisions that came twice; the first counts."),
        ("superseded/decision", "Decisions of requests that were sent again to another worker; the last one counts."),
        ("duplicate/outcome", "Outcomes that came twice; the first counts."),
        ("closed_early", "Requests closed before their time since more were open than open_bytes holds: do outcomes come at all?"),
        ("open_records_lost", "Open records that could not be read again after a restart; their requests have no row."),
    ):
        value = c[name]
        grave = name in ("closed_early", "open_records_lost")
        status = "warn" if value and (grave or value / outcomes > MISSING_WARN_SHARE) else "ok"
        rows.append(Check("join", "", name.replace("/", "_"), value, "records", status, sentence))
    told, untold = c["told"], c["untold"]
    rows.append(
        Check("join", "", "hits_untold", untold, "requests", "warn" if untold > told * MISSING_WARN_SHARE and untold else "ok",
              "Requests whose hit could not be told from events: gaps, unknown starts, silent bridges, other hash keys, "
              "or more traffic than recent_hashes holds.")
    )  # fmt: skip
    return rows


def _hash_keys(fold: Fold, standings: Sequence[Standing], now_s: float) -> list[Check]:
    """One row a pool of which a bridge or a router said lately which key it has."""
    told: dict[str, dict[str, set[str]]] = {}
    for who, s in zip(fold.workers, standings, strict=True):
        load = fold.loads.get(who)
        if load is not None and load.bridge.key_id is not None and not s.stale:
            told.setdefault(who.pool, {}).setdefault(load.bridge.key_id, set()).add(f"the bridge of {who.worker}")
    for (pool, key_id), (at_s, router) in fold.router_keys.items():
        if now_s - at_s <= KEY_SEEN_S:
            told.setdefault(pool, {}).setdefault(key_id, set()).add(f"router {router}")
    out = []
    for pool, keys in sorted(told.items()):
        text = "Bridges and routers make block names with the same key."
        if len(keys) > 1:
            named = "; ".join(f"{key_id}: {_some(sorted(users))}" for key_id, users in sorted(keys.items()))
            text = f"Block names are made with different keys ({named}) and never match: set the same hash_key for bridges and routers."
        out.append(Check("join", pool, "hash_keys", len(keys), "keys", "bad" if len(keys) > 1 else "ok", text))
    return out


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _events_agree(fold: Fold, now_s: float) -> Check:
    lately = [counts for start, counts in fold.agreement.items() if now_s - AGREE_S <= start <= now_s]
    compared, differ = sum(c[0] for c in lately), sum(c[1] for c in lately)
    if not compared:
        text = "No request of the last 5 minutes has both a hit told from events and one that its engine reported."
        return Check("join", "", "events_agree", None, "share that differ", "unknown", text)
    share = differ / compared
    text = f"Of {compared} requests of the last 5 minutes, {differ} have another hit by events than their engine reported."
    if share > DISAGREE_WARN:
        text += (
            " Look at requests where event_hit_tokens <> cached_tokens. Of one worker: does its bridge read another engine's events? "
            "Of all: does the router make other prompts than the engine (tokenizer, chat template, LoRA, cache_salt, block size)?"
        )
    status = "bad" if share > DISAGREE_BAD else "warn" if share > DISAGREE_WARN else "ok"
    return Check("join", "", "events_agree", share, "share that differ", status, text)


def _workers(fold: Fold, standings: Sequence[Standing], now_s: float) -> list[Check]:
    out = []
    for number, who in enumerate(fold.workers):
        w, load, subject = fold.residency.workers[number], fold.loads.get(who), str(who)
        trust, reason, stale = standings[number].trust, standings[number].reason, standings[number].stale
        status = {Trust.EXACT: "ok", Trust.DEGRADED: "warn", Trust.BLIND: "bad" if stale else "unknown"}[trust]
        text = f"Trust in its index is {trust}{': ' + reason if reason else ''}"
        out.append(Check("bridge", subject, "trust", None, "", status, text if text.endswith("?") else text + "."))
        out.append(
            Check("bridge", subject, "lost_batches", int(w["lost_batches"]), "batches", "warn" if w["lost_batches"] else "ok",
                  "Engine batches lost for good since the start.")
        )  # fmt: skip
        for name, sentence in (
            ("unknown_removals", "Removals of blocks that were not held; they changed nothing."),
            ("mismatches", "Copies by which snapshots differed from an exact state."),
            ("stale_records", "Records that came again or too late; they changed nothing."),
        ):
            if w[name]:
                out.append(
                    Check("bridge", subject, name, int(w[name]), "blocks" if name != "stale_records" else "records", "warn", sentence)
                )
        if load is not None:
            age_s = max(0.0, now_s - load.time_s)
            if age_s > LOAD_STALE_S:
                text = f"The newest reading is {age_s:.0f} s old; whether its metrics page answers now is not known: is its bridge running?"
                status = "bad" if trust is Trust.BLIND and stale else "warn"
            elif load.up:
                text, status = "The engine's metrics page answers.", "ok"
            else:
                text, status = "The engine's metrics page does not answer: is the worker up?", "bad"
            out.append(Check("bridge", subject, "load_age_s", age_s, "s", status, text))
            for name in ("mangled_frames", "skipped_events", "dropped_records"):
                value = getattr(load.bridge, name)
                if value:
                    out.append(Check("bridge", subject, name, value, "", "warn", "As the bridge counts since its start."))
    return out
