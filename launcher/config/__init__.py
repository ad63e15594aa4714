"""What one config file says: its keys, how it is read, and what is wrong with it."""
