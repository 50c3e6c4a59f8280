"""Block drafters in the files of other tools: written and proven, read, exported."""
