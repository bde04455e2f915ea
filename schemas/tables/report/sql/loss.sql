-- Which causes made the fleet compute prompt tokens, and what did that cost?
SELECT cause, tokens, share, requests, lost_s, seconds_known_tokens, gpu_s, money, currency, avoidable, who_can_act, meaning
FROM loss($since, $until, in_pool := $pool)
