-- What are the seconds and the money computed from?
SELECT pool, model, hardware, source, observations, residual_s, gpus, price_per_gpu_hour, currency, fitted_at
FROM cost_models WHERE $pool IS NULL OR pool = $pool ORDER BY pool, model, hardware
