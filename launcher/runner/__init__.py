"""Runs: started, followed, stopped, replayed and compared."""
