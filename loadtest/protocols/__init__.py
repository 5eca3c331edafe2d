"""The protocols over which requests reach a server: gRPC, HTTP, KServe."""
