"""Minigo: Go by self-play, trained, played and evaluated by the ranks in a single run."""
