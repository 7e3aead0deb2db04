"""Images and container engines: the catalogue of bases, building, and the runtimes that run a job."""
