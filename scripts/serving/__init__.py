"""A client of inference servers, and their counters: shared by commands that talk to a server."""
