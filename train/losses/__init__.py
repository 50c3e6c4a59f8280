"""Losses: divergences and objectives, in full and in bounded memory."""
