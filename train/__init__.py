"""Shared by all recipes: prompts, target completions, masks, model loading, acceptance during training."""
