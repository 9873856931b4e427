"""Gates: which experts take which tokens, the same whether a micro-batch is routed whole or in partitions of its samples."""
