"""The gRPC frontend: services, health, the metrics page."""
