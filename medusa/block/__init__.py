"""Block drafters: a few layers on features of the target that draft a block of tokens in one forward."""
