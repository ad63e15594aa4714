"""What label banks hold: shown, verified, merged, exported."""
