"""Conversations: what goes into a chat template, and which of its tokens are learned."""
