"""Serves requests in steps: scheduler, sequences, KV blocks, sampling, the model's runner."""
