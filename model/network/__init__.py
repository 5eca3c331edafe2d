"""What the Transformer is."""
