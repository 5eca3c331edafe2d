"""`quill doctor`: whether a bundle computes here what it should, and how fast."""
