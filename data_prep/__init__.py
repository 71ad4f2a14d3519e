"""Raw text to indexed Arrow shards of training rows."""
