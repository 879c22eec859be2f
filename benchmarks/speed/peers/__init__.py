"""Our rollout and update beside the released code of others: the same work first, then CPU seconds in turns."""
