"""What the commands that talk to an inference server share: a client, and the server's counters."""
