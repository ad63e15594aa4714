"""Runs: started, followed, stopped, repeated, and compared."""
