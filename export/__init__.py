"""A checkpoint becomes a bundle: ONNX graphs, tokenizer, manifest, and the proof that they agree."""
