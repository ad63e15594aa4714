"""What the entry scripts share. It travels with them to the training machine and never imports the launcher."""
