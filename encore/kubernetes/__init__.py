"""Runs in the pods of a Kubernetes cluster: the manifests of an experiment, and its state by the cluster's API."""
