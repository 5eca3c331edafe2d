"""KServe v2: the door for Triton's clients, on the gRPC port."""
