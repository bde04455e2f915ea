"""Anything else: read-only SQL on the published tables, with saved questions and the meaning of every column."""

from __future__ import annotations

import io
from itertools import groupby
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import streamlit as st

from dashboard import queries, units
from dashboard.components.panel import nothing, panel
from dashboard.components.tables import ROW_PX
from dashboard.components.text import markdown_text
from dashboard.components.view import View, begin
from dashboard.console import ConsoleError, Limits, Result, run
from schemas.tables.read import PublishedError

_FIRST = """SELECT worker, sum(cached_tokens) / sum(reported_prompt_tokens) AS hit_rate, sum(requests) AS requests
FROM worker_10s
GROUP BY worker
ORDER BY hit_rate"""


def sql() -> None:
    view = begin("sql")
    settings = view.site.settings
    left, right = st.columns([7, 3], gap="small")
    limits = f"at most {units.seconds(settings.sql_timeout_s)} and {settings.sql_max_rows:_} rows".replace("_", " ")
    with left, panel(view, "SQL", f"DuckDB, reads only · {limits} · times are UTC"):
        _editor(view)
    with right:
        _schema(view)


def _editor(view: View) -> None:
    questions = {name: queries.query(name).question for name in queries.names() if name not in ("names", "schema")}
    state = st.session_state
    if "sql_text" not in state:
        state["sql_text"] = _FIRST

    def chosen() -> None:
        name = state["sql_question"]
        if name is not None:
            state["sql_text"] = view.sql(name, measure="ttft", most=100)

    st.selectbox(
        "Saved question",
        list(questions),
        index=None,
        key="sql_question",
        format_func=lambda name: questions[name],
        placeholder="Begin with a saved question",
        label_visibility="collapsed",
        on_change=chosen,
    )
    st.text_area("Query", key="sql_text", height=210, label_visibility="collapsed")
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        asked = st.button("Run", type="primary")
        clicked_at = st.empty()
    if asked:
        settings = view.site.settings
        limits = Limits(settings.sql_timeout_s, settings.sql_max_rows, settings.sql_memory)
        try:
            state["sql_result"] = run(view.site.database.path, state["sql_text"], limits)
        except (ConsoleError, PublishedError) as e:
            state["sql_result"] = str(e)
    result: Result | str | None = state.get("sql_result")
    if isinstance(result, str):
        with st.container(border=True, key="sql-error"):
            st.text(result)
    elif result is not None:
        with clicked_at.container(horizontal=True, vertical_alignment="center", gap="small"):
            _summary(result)
        _table(result.rows)
    else:
        nothing("The answer appears here. Ctrl+Enter in the editor takes the text over, then Run.")


def _summary(result: Result) -> None:
    found = f"{result.rows.num_rows:,}".replace(",", " ")
    more = ", and more: they are cut here" if result.more else ""
    st.caption(f"{found} rows{more} · {units.seconds(result.seconds)}")
    st.download_button("CSV", data=lambda: _csv(result.rows), file_name="warmwatch.csv", mime="text/csv", on_click="ignore")


def _table(rows: pa.Table) -> None:
    if rows.num_rows == 0:
        nothing("No rows.")
        return
    frame = _shown(rows)
    st.dataframe(
        frame,
        key="sql-table",
        hide_index=True,
        row_height=ROW_PX,
        height=min(560, ROW_PX * (rows.num_rows + 1) + 4),
        placeholder="NULL",
        column_config={
            name: st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss.SSS")
            for name, kind in zip(rows.schema.names, rows.schema.types, strict=True)
            if pa.types.is_timestamp(kind)
        },
    )


def _shown(rows: pa.Table) -> pd.DataFrame:
    """For the browser: 64-bit hashes as text, since its numbers end at 2^53; bytes as hexadecimal digits."""
    columns: dict[str, Any] = {}
    for i, field in enumerate(rows.schema):
        column = rows.column(i)
        name = field.name if field.name not in columns else f"{field.name} ({i + 1})"
        if pa.types.is_uint64(field.type) or (pa.types.is_decimal(field.type) and field.type.scale == 0):
            large = any(v is not None and v >= 2**53 for v in column.to_pylist())
            columns[name] = [None if v is None else str(v) if large else int(v) for v in column.to_pylist()]
            if not large:
                columns[name] = pd.array(columns[name], dtype="Int64")
        elif pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            columns[name] = [None if v is None else v.hex() for v in column.to_pylist()]
        else:
            columns[name] = column.to_pandas()
    return pd.DataFrame(columns)


def _csv(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    plain = rows
    for i, field in enumerate(rows.schema):
        if pa.types.is_nested(field.type) or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            plain = plain.set_column(i, field.name, pa.array([_cell(v) for v in rows.column(i).to_pylist()], pa.string()))
    pyarrow.csv.write_csv(plain, out)
    return out.getvalue()


def _cell(value: Any) -> str | None:
    """Bytes as hexadecimal digits, as on the screen."""
    return None if value is None else value.hex() if isinstance(value, bytes) else str(value)


def _schema(view: View) -> None:
    with panel(view, "Tables", "what each column means"):
        rows = view.ask("schema")
        for table, columns in groupby(rows, key=lambda r: r["table_name"]):
            here = list(columns)
            with st.expander(table):
                st.caption(markdown_text(here[0]["table_comment"] or "No comment."))
                st.dataframe(
                    pd.DataFrame(here)[["column_name", "data_type", "comment"]],
                    key=f"schema-{table}",
                    hide_index=True,
                    row_height=ROW_PX,
                    column_config={
                        "column_name": st.column_config.TextColumn("column", width=130),
                        "data_type": st.column_config.TextColumn("type", width=80),
                        "comment": st.column_config.TextColumn("meaning", width="large"),
                    },
                )
        with st.expander("Macros"):
            st.caption("hit\\_rate(since, until): token-weighted share of prompt tokens found in the cache.")
            st.caption("ttft(worker, q, since, until): TTFT percentile in seconds; worker NULL: all.")
