"""Services beside the commands: drafts over HTTP, and the coordinator of servers."""
