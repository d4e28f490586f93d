"""One module per op group, each with `OPS`: the descriptions of its ops."""
