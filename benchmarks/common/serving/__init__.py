"""Code of Triton Inference Server and of its clients: copied next to a model, or started by `encore serve`."""
