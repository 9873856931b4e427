"""What a micro-batch holds besides tokens, labels, loss_mask, position_ids and attention_mask."""

TOKEN_COUNT = "token_count"
"""Where several ranks share the sequences: tokens of the whole sequences that count in the loss, a scalar."""
