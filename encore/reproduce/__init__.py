"""From a folder that was published to the configuration here that reproduces it."""
