"""What an inference server answers: requests to it, what its answers become, and logs of those that others asked."""
