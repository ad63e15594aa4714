"""The diagnosis's rules, one file a subject: each takes a run's evidence and answers one question. table.py lists them."""
