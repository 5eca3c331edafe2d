"""The KServe v2 frontend, for Triton's clients, on the gRPC port."""
