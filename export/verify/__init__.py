"""The proof that the files compute what PyTorch computes."""
