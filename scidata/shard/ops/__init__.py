"""The op table of ShardTensor: one module per family of torch functions, each adding its entries when imported."""
