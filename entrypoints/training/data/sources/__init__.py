"""Where images come from: class folders or shards."""
