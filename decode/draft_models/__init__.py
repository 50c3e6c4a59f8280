"""Parts of draft models that other causal LMs lack: cut vocabularies and trees of their own."""
