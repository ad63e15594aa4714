"""Label banks: show, verify, merge and export them."""
