"""Everything that runs on Ray: actors that forward to plain classes one floor down, and the pools that manage them."""
