"""Runs on Kubernetes: manifests of an experiment and a client for the API."""
