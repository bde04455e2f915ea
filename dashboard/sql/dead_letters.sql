-- Which were the last records that could not be used?
-- parameters: most
-- grain: one row a record, newest first
SELECT "at", topic, stream_partition, stream_offset, key, reason, size_bytes FROM dead_letters ORDER BY "at" DESC LIMIT $most
