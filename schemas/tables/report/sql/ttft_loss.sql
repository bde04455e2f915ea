-- How much of the time to first token was prefill of tokens that the cache could have held?
SELECT pool, requests, lost_share, avoidable_share FROM ttft_loss($since, $until, in_pool := $pool) ORDER BY pool
