"""Runs on Kubernetes: manifests per experiment and a client for the API."""
