"""Serve a trained model in Triton Inference Server: export, model repository, server."""
