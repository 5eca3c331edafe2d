"""A checkpoint becomes a bundle, with the proof that it computes what PyTorch computes."""
