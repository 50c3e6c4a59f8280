"""Services of ours: drafts over HTTP, the coordinator of servers, and what runs inside a vLLM."""
