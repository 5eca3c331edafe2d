"""The reference: slow and obvious decoding, sampling and beam search."""
