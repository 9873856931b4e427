"""From files of text or ids to the micro-batches of a run."""
