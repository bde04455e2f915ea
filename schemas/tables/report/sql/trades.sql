-- What did routing lose by the cost model, and what did load bypasses buy?
SELECT sum(requests) AS requests, sum(regret_tokens) AS regret_tokens, sum(misrouted_s) AS misrouted_s, sum(bypass_bought_s) AS bypass_bought_s
FROM ladder_10s WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)
HAVING count(*) > 0
