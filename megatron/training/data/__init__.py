"""Data: files of text or token ids become the micro-batches of a run."""
