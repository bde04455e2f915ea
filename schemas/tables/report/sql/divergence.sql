-- Where do prompts of one kind stop being alike?
SELECT pool, model, route, tenant, template, requests, all_requests, depth_from, depth_to, depth_share, diverged_tokens, all_prompt_tokens,
  share, lost_s, example_request_id
FROM divergence_of($since, $until, in_pool := $pool) ORDER BY diverged_tokens DESC, route LIMIT $top
