"""Services: drafts over HTTP, and the coordinator of servers."""
