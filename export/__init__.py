"""From a checkpoint to a bundle, verified against PyTorch."""
