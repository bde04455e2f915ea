-- Which workers are there, what do they hold, and how far is their index to be trusted?
-- parameters: pool, worker, model
-- grain: one row a worker and rank
SELECT * FROM workers
WHERE ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker) AND ($model IS NULL OR model = $model)
ORDER BY pool, worker, rank
