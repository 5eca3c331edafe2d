"""How a request gets to a server, and its answer back: gRPC, HTTP, KServe."""
