"""Token dispatchers: the wire, the irregular two-phase all-to-all, and the capacity-chunk baseline."""
