"""Verification: the graphs compute what PyTorch computes, within a tolerance."""
