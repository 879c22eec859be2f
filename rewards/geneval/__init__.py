"""GenEval: the scorer, its clauses and verdicts, and detectors."""
