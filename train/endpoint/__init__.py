"""Inference servers: requests to them, their answers, and logs of other clients' requests."""
