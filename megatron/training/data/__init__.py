"""From files of text or token ids to the micro-batches of a run."""
