"""What stands on the core, and what the core never imports."""
