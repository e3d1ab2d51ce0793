"""Layer 2: finding, checking and loading plugins by name, and the typed calls of a backend's hooks. No torch."""
