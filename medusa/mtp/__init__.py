"""Native MTP layers: the layers for multi-token prediction that targets ship with, run by the library's `MtpModel`."""
