"""Logits become tokens, all rows at once, as the oracle in model/reference says."""
