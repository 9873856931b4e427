"""Token dispatchers: the wire, the irregular two-phase exchange, and the capacity-chunk baseline."""
