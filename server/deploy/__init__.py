"""Manifests for Kubernetes, and the dashboard's generator."""
