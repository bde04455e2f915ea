-- Which were the last records that could not be used?
-- parameters: most
-- grain: one row a record, newest first
SELECT set_aside_at, topic, stream_partition, stream_offset, key, reason, size_bytes FROM dead_letters ORDER BY set_aside_at DESC LIMIT $most
