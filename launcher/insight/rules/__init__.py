"""The diagnosis's rules, one file per subject: each takes a run's evidence and answers one question. table.py lists them."""
