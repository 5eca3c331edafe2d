"""The network becomes ONNX files."""
