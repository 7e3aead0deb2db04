"""The life of a run: plan, check, prepare, run, follow, judge, resume, cancel."""
