"""The target's features, under the name that they began with: see `draftsmith.decode.cache.features`."""

from draftsmith.decode.cache.features import Features, check_layers, collected, decoder_layers, default_layers

__all__ = ["Features", "check_layers", "collected", "decoder_layers", "default_layers"]
