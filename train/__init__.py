"""What every recipe shares: prompts, target completions, masks, model loading, acceptance during training."""
