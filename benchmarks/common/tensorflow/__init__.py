"""Code that the networks in TensorFlow share."""
