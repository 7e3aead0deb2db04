"""What the implementations share inside the container."""
