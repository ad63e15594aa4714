"""Why a run is slow: its measurements, what they mean, and how that is shown."""
