"""Who is served, when: gRPC, continuous batching, sampling, text. Never imports torch or model."""
