"""Every door: gRPC, health, the metrics page."""
