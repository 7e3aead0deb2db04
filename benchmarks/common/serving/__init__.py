"""Triton Inference Server: model code and clients, copied to the model or started by `encore serve`."""
