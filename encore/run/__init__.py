"""The life of a run: plan, check, prepare, run, follow, evaluate, resume, cancel."""
