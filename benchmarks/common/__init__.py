"""Code that the implementations share inside the container."""
