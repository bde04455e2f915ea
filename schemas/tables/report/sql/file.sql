-- What is this file, and what was it made from?
SELECT published_at, watermark, version, collector, has_events, has_decisions, has_outcomes, has_load, state FROM published
