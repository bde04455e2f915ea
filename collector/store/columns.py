"""From the published contract to Arrow: one schema a table, so that segments, live parts and views agree to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from schemas.tables.table import Table

_TYPES: dict[str, pa.DataType] = {
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us"),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "UBIGINT[]": pa.list_(pa.uint64()),
    "STRUCT(cause VARCHAR, tokens UINTEGER)[]": pa.list_(pa.struct([("cause", pa.string()), ("tokens", pa.uint32())])),
    "STRUCT(cause VARCHAR, tokens UBIGINT)[]": pa.list_(pa.struct([("cause", pa.string()), ("tokens", pa.uint64())])),
}


def arrow_schema(table: Table) -> pa.Schema:
    """Raises KeyError for a DDL type that has no Arrow counterpart here."""
    return pa.schema([pa.field(c.name, _TYPES[c.type]) for c in table.columns])


def from_rows(schema: pa.Schema, rows: Sequence[Sequence[object]]) -> pa.Table:
    """A table of rows whose values stand in the schema's order; times are integers, microseconds since 1970."""
    columns: Iterable[Sequence[object]] = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def micros(time_s: float) -> int:
    """Unix seconds -> microseconds, the unit of all times here. Clamped to what a TIMESTAMP holds: clocks of others can be anything."""
    return max(-(1 << 61), min(1 << 61, round(time_s * 1e6)))
