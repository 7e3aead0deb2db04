"""What runs in Triton Inference Server and in its clients: copied next to a model, or started by `encore serve`."""
