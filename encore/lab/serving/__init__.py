"""A trained model in Triton Inference Server: an export, its model repository, and the server."""
