"""Five networks on one to several devices, by two ways of communication, in MXNet."""
