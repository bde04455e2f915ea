"""What a published table is: columns with types and comments, and the SQL that makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    comment: str


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    comment: str
    columns: tuple[Column, ...]

    def ddl(self, schema: str = "main") -> str:
        """CREATE TABLE with a COMMENT on the table and on every column."""
        body = ",\n".join(f'  "{c.name}" {c.type}' for c in self.columns)
        return f'CREATE TABLE {schema}."{self.name}" (\n{body}\n);\n{self.comments("TABLE", schema)}'

    def comments(self, kind: str, schema: str = "main") -> str:
        """COMMENT statements for a TABLE or VIEW of these columns."""
        lines = [f'COMMENT ON {kind} {schema}."{self.name}" IS {quote(self.comment)};']
        lines += [f'COMMENT ON COLUMN {schema}."{self.name}"."{c.name}" IS {quote(c.comment)};' for c in self.columns]
        return "\n".join(lines)


def quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def table(name: str, comment: str, *rows: tuple[str, str, str]) -> Table:
    return Table(name, comment, tuple(Column(*r) for r in rows))


WHO = (
    ("pool", "VARCHAR", "Pool: workers that serve one model with one tokenizer, block size and cache namespace."),
    ("worker", "VARCHAR", "Worker name, by default host:port of its HTTP address."),
    ("rank", "USMALLINT", "Data-parallel rank inside the worker; NULL: the router does not know it and events do not tell."),
)
