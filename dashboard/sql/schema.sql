-- Which tables and columns are there, and what do they mean?
-- parameters: none
-- grain: one row a column
SELECT c.table_name, c.column_name, c.data_type, c.comment, coalesce(t.comment, v.comment) AS table_comment
FROM duckdb_columns() c
LEFT JOIN duckdb_tables() t ON t.database_name = c.database_name AND t.table_name = c.table_name
LEFT JOIN duckdb_views() v ON v.database_name = c.database_name AND v.view_name = c.table_name
WHERE c.database_name = 'warmwatch' AND NOT c.internal
ORDER BY c.table_name, c.column_index
