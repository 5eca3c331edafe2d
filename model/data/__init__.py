"""From a wheel or a file to batches of token ids."""
