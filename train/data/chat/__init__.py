"""Conversations: messages, the chat template that renders them, and masks of the tokens to learn."""
