"""Five networks on one or several devices, with different communication methods, in MXNet."""
