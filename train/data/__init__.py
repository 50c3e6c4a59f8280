"""From prompts to batches: prompts, completions, masks, shards, packing."""
