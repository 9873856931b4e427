"""The flags that the configuration's fields define, and those that have no effect in a run."""
