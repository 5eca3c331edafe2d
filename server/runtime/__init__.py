"""One step on ONNX Runtime, and the memory that rows keep."""
