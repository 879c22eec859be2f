"""GenEval: the scorer, the clauses of a prompt, the verdicts, and a detector for photographs."""
