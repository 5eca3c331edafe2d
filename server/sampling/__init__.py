"""Samples tokens from logits, a whole step at once, by the rules of model/reference."""
