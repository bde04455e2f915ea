-- When do the data begin?
-- parameters: since, until
-- grain: one row; NULL: nothing in this window
SELECT min(bucket) AS first_bucket FROM worker_10s WHERE bucket >= $since AND bucket < $until
