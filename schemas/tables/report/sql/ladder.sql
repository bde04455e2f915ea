-- What did each step lose on the way from "computed once" to "found"?
SELECT position, step, tokens, share, lost_here, requests, meaning FROM ladder($since, $until, in_pool := $pool) ORDER BY position
