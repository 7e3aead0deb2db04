"""The command line, one module per topic; each offers ``register(app)``."""
