"""The candidates of one stage: which of them a pipeline may need."""
