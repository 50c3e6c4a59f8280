"""`draftsmith measure --server`: acceptance, latency and speed-up of a server that runs, seen from outside."""
